"""Memory and disk on paper against sums done by hand, in bytes."""

from __future__ import annotations

import pytest

from cluster import plan
from cluster.plan import GIB, MIB, ModelSize
from conf.schema import Config, StageConfig

MILLION = 1_000_000
SIZE = ModelSize(MILLION, layers=2, hidden=100, vocabulary=1000)


def config(ranks: int = 1, stage: int = 0, dtype: str = "float32", **algorithm: object) -> Config:
    cfg = Config()
    cfg.learner.ranks, cfg.learner.zero_stage, cfg.model.dtype = ranks, stage, dtype
    for name, value in algorithm.items():
        setattr(cfg.algorithm, name, value)
    return cfg


@pytest.mark.parametrize(
    "ranks, stage, dtype, weights, gradients, optimizer",
    [
        (1, 0, "float32", 4, 4, 8),
        (1, 0, "bfloat16", 2, 2, 12),  # with a float32 master
        (1, 1, "float32", 4, 4, 12),  # ZeRO keeps a flat master of its own
        (4, 0, "float32", 16, 16, 32),  # everything in every rank, all on this machine
        (4, 1, "float32", 16, 16, 12),
        (4, 2, "float32", 16, 4, 12),
        (4, 3, "float32", 4, 4, 12),
        (2, 3, "bfloat16", 2, 2, 12),
    ],
)
def test_learner(
    ranks: int, stage: int, dtype: str, weights: int, gradients: int, optimizer: int
) -> None:
    parts = plan.memory(config(ranks, stage, dtype), SIZE)
    found = [parts[name] // MILLION for name in ("learner weights", "gradients", "optimizer state")]
    assert found == [weights, gradients, optimizer]


def test_the_other_parts() -> None:
    cfg = config(beta=0.1, kl_placement="loss")
    cfg.generator.count, cfg.generator.kv_cache_gib, cfg.reference.count, cfg.reward.workers = (
        2,
        2.6,
        3,
        5,
    )
    parts = plan.memory(cfg, SIZE)
    assert parts["generator weights"] == 2 * 2 * 4 * MILLION
    assert (
        parts["generator cache"] == 2 * 3 * GIB
    )  # whole GiB, rounded as the generator's environment rounds
    assert parts["reference"] == 3 * 4 * MILLION
    assert parts["object store"] == 512 * MIB
    assert parts["processes"] == (600 + 2 * 1450 + 3 * 350 + 5 * 100 + 1200) * MIB
    cfg.algorithm.beta = 0.0
    assert "reference" not in plan.memory(cfg, SIZE)
    cfg.learner.gpus = cfg.generator.gpus = 1.0
    assert set(plan.memory(cfg, SIZE)) == {"object store", "processes"}
    assert plan.passing(cfg, SIZE) == {}


def test_reward_models_are_served_and_trained_beside_the_policy() -> None:
    cfg, rewards = (
        config(ranks=2, stage=1),
        {"orm": ModelSize(3 * MILLION), "prm": ModelSize(5 * MILLION)},
    )
    cfg.reward_model.count = 2
    without = plan.memory(cfg, SIZE)
    cfg.reward.models = dict.fromkeys(rewards, {"path": "some/model"})
    served = plan.memory(cfg, SIZE, rewards)
    assert served["reward models"] == 2 * 4 * (3 + 5) * MILLION and "reward learner" not in served
    assert served["processes"] - without["processes"] == 2 * 350 * MIB
    cfg.reward_model.refresh = "orm"
    assert plan.memory(cfg, SIZE, rewards) == served  # named, and never trained
    cfg.reward_model.every = 5
    refreshed = plan.memory(cfg, SIZE, rewards)
    assert (
        refreshed["reward learner"] == 3 * (2 * (4 + 4) + 12) * MILLION
    )  # two ranks, the optimizer's part sharded
    assert refreshed["processes"] - served["processes"] == 2 * 600 * MIB
    cfg.reward_model.gpus = cfg.learner.gpus = 1.0
    assert not {"reward models", "reward learner"} & set(plan.memory(cfg, SIZE, rewards))


def test_a_model_without_a_head_keeps_what_it_began_as() -> None:
    cfg, rewards = config(ranks=2, stage=1), {"orm": ModelSize(3 * MILLION, frozen=3 * MILLION)}
    cfg.reward.models = {"orm": {"path": "some/model"}}
    cfg.reward_model.refresh, cfg.reward_model.every = "orm", 5
    found = plan.memory(cfg, SIZE, rewards)
    assert found["reward models"] == 4 * 6 * MILLION
    assert (
        found["reward learner"] == 3 * (2 * (4 + 4 + 4) + 12) * MILLION
    )  # the reference whole on both ranks
    cfg.stage = StageConfig("reward_model", "policy", "reward_model", False)
    assert "reward reference" not in plan.memory(cfg, SIZE)
    cfg.reward_model.head = "implicit"
    assert plan.memory(cfg, SIZE)["reward reference"] == 2 * 4 * MILLION


def test_every_stage_that_samples_has_generators() -> None:
    cfg, none = config(), {"generator weights", "generator cache"}
    cfg.stage = StageConfig("annotate", "policy", "nothing", False)
    assert none <= set(plan.memory(cfg, SIZE))
    assert (
        plan.memory(cfg, SIZE)["processes"] == (600 + 1450 + cfg.reward.workers * 100 + 1200) * MIB
    )
    cfg.stage = StageConfig("reward_model", "files", "reward_model", False)
    assert not none & set(plan.memory(cfg, SIZE))


def test_a_critic_is_a_second_model() -> None:
    alone, both = plan.memory(config(), SIZE), plan.memory(config(critic=True), SIZE)
    assert (
        both["optimizer state"] == 2 * alone["optimizer state"]
        and both["gradients"] == 2 * alone["gradients"]
    )


def test_pretraining_has_no_generator() -> None:
    cfg = config(beta=0.1, kl_placement="loss")
    cfg.stage = StageConfig("pretrain", "corpus", "policy", False)
    assert set(plan.memory(cfg, SIZE)) == {
        "learner weights",
        "gradients",
        "optimizer state",
        "object store",
        "processes",
    }


def test_what_passes_in_a_step() -> None:
    cfg = config()
    cfg.learner.micro_batch_tokens, cfg.learner.logprob_chunk_tokens = 1000, 400
    assert plan.passing(cfg, SIZE) == {
        "activations": 1000 * 2 * 100 * 17 * 4,
        "logits": 400 * 1000 * 4 * 3,
    }
    cfg.learner.gradient_checkpointing, cfg.learner.ranks = True, 2
    assert (
        plan.passing(cfg, SIZE)["activations"] == 2 * 1000 * 100 * (2 + 17) * 4
    )  # inputs of layers, one layer whole


@pytest.mark.parametrize(
    "every, keep, steps, checkpoints",
    [(20, 2, 100, 2 + 1), (0, 2, 100, 1 + 1), (20, 0, 100, 6 + 1), (60, 3, 100, 2 + 1)],
)
def test_disk(every: int, keep: int, steps: int, checkpoints: int) -> None:
    """The checkpoints that stay, one being written beside them, and the final model (4 MB)."""
    cfg = config()
    cfg.checkpoint.every, cfg.checkpoint.keep, cfg.steps = every, keep, steps
    assert plan.checkpoint(cfg, SIZE) == 12 * MILLION
    assert plan.disk(cfg, SIZE) == checkpoints * 12 * MILLION + 4 * MILLION
    assert plan.checkpoint(config(critic=True), SIZE) == 24 * MILLION
    assert plan.checkpoint(config(reference_reset_every=5), SIZE) == 16 * MILLION


def test_amounts() -> None:
    assert plan.amount(1536 * MIB) == "1.5 GiB" and plan.amount(3 * MIB) == "3 MiB"
    assert (
        plan.show({"small": 5 * MIB, "none": 0, "large": 2 * GIB})
        == "2.0 GiB (large 2.0 GiB, small 5 MiB)"
    )
