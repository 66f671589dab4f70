"""Scores of packed micro-batches are those of one answer at a time in plain transformers; the rest
says what it is."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from actors.modeling.loading import ModelError
from conf.schema import ConfigError
from reward_service.models.heads import (
    REFERENCE,
    ImplicitRewardModel,
    RewardModel,
    load_reward_model,
)
from reward_service.models.meaning import KEY, Meaning, meaning
from reward_service.models.scoring import judge

CONTEXT = 64
CONFIG = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=CONTEXT,
    initializer_range=0.2,
    pad_token_id=0,
)


@pytest.fixture(scope="module")
def module() -> RewardModel:
    torch.manual_seed(0)
    return RewardModel(LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=1)).eval())


def answers(n: int) -> tuple[list[np.ndarray], list[np.ndarray], list[list[int]]]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 50, rng.integers(1, 9)) for _ in range(n)]
    completions = [rng.integers(1, 50, rng.integers(3, 50)) for _ in range(n)]
    ends = [sorted({*rng.choice(len(c), 2).tolist(), len(c) - 1}) for c in completions]
    return prompts, completions, ends


@pytest.mark.parametrize("budget", [1, 70, 400, 100_000])
@pytest.mark.parametrize(
    "how", [Meaning(), Meaning("outcome", True), Meaning("process", True, "newline")]
)
def test_whatever_the_budget_scores_are_those_of_one_at_a_time(
    module: RewardModel, budget: int, how: Meaning
) -> None:
    prompts, completions, ends = answers(12)
    found = judge(module, how, prompts, completions, ends, budget)
    for p, c, e, verdict in zip(prompts, completions, ends, found, strict=True):
        hidden = (
            module.model.double().model(input_ids=torch.tensor([[*p, *c]])).last_hidden_state[0]
        )
        logits = module.model.score(hidden)[len(p) :, 0].detach().numpy()
        module.model.float()
        values = 1 / (1 + np.exp(-logits)) if how.probability else logits
        assert verdict.status == "ok"
        if how.kind == "outcome":
            assert verdict.score == pytest.approx(values[-1], abs=1e-5) and verdict.steps is None
        else:
            assert (
                verdict.steps[0] == pytest.approx(values[e].tolist(), abs=1e-5)
                and verdict.steps[1] == e
            )
            assert verdict.score == min(verdict.steps[0])


def causal(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def log_ratio(
    pair: tuple[LlamaForCausalLM, ...], prompt: np.ndarray, completion: np.ndarray
) -> list[float]:
    """log pi/pi_ref of the completion up to and with each of its tokens, float64, token by
    token."""
    ids, total, sums = [*prompt.tolist(), *completion.tolist()], 0.0, []
    with torch.no_grad():
        logps = [torch.log_softmax(m(torch.tensor([ids])).logits[0], -1).tolist() for m in pair]
    for t in range(len(prompt), len(ids)):
        total += (
            logps[0][t - 1][ids[t]] - logps[1][t - 1][ids[t]] if t else 0.0
        )  # nothing precedes token 0
        sums.append(total)
    return sums


@pytest.fixture(scope="module")
def log_ratios() -> list[list[float]]:
    pair = (causal(1).double(), causal(2).double())
    return [log_ratio(pair, p, c) for p, c, _ in zip(*without_a_prompt(), strict=True)]


def without_a_prompt() -> tuple[list[np.ndarray], list[np.ndarray], list[list[int]]]:
    prompts, completions, ends = answers(12)
    return [np.empty(0, np.int64), *prompts[1:]], completions, ends


@pytest.mark.parametrize("budget", [1, 70, 100_000])
@pytest.mark.parametrize("how", [Meaning("outcome", True), Meaning("process", False, "newline")])
def test_without_a_head_a_score_is_the_log_ratio_of_the_answer_so_far(
    log_ratios: list[list[float]], budget: int, how: Meaning
) -> None:
    """Logits of 3 tokens at once."""
    prompts, completions, ends = without_a_prompt()
    found = judge(
        ImplicitRewardModel(causal(1), causal(2), 0.3, 3), how, prompts, completions, ends, budget
    )
    for sums, e, verdict in zip(log_ratios, ends, found, strict=True):
        wanted = [1 / (1 + math.exp(-0.3 * s)) if how.probability else 0.3 * s for s in sums]
        assert verdict.status == "ok"
        if how.kind == "outcome":
            assert verdict.score == pytest.approx(wanted[-1], abs=1e-5)
        else:
            assert verdict.steps[0] == pytest.approx([wanted[i] for i in e], abs=1e-5)
            assert verdict.score == min(verdict.steps[0])


def test_a_directory_holds_what_a_model_without_a_head_began_as(tmp_path: Path) -> None:
    saved = ImplicitRewardModel(causal(1), causal(2), 0.3, 100)
    told = asdict(Meaning("outcome", True, "", "implicit", 0.3))
    setattr(saved.model.config, KEY, told)
    saved.model.save_pretrained(tmp_path)
    saved.save_extra_files(tmp_path)
    assert meaning(str(tmp_path), {}) == Meaning("outcome", True, "", "implicit", 0.3)
    prompts, completions, ends = answers(6)
    for trained in (True, False):  # to be trained further its reference stays the same
        again = load_reward_model(str(tmp_path), trained=trained, head="implicit", beta=0.3)
        both = [
            [v.score for v in judge(m, Meaning(), prompts, completions, ends, 400)]
            for m in (saved, again)
        ]
        assert both[0] == both[1] and len(set(both[0])) == 6
    assert not any(name.startswith("reference") for name, _ in again.named_parameters())
    new = causal(3)
    new.save_pretrained(tmp_path / "causal")
    fresh = load_reward_model(str(tmp_path / "causal"), trained=False, head="implicit", beta=0.3)
    assert {v.score for v in judge(fresh, Meaning(), prompts, completions, ends, 400)} == {0.0}
    with pytest.raises(ModelError, match="has the head implicit, not reward_model.head=scalar"):
        load_reward_model(str(tmp_path), trained=False)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / REFERENCE)
    with pytest.raises(
        ModelError, match="reference.safetensors lacks or adds lm_head.weight.*Train it anew"
    ):
        load_reward_model(str(tmp_path))
    (tmp_path / REFERENCE).unlink()
    with pytest.raises(ModelError, match="cannot load.*reference.safetensors"):
        load_reward_model(str(tmp_path))


def test_what_does_not_fit_or_is_not_finite_has_no_number(module: RewardModel) -> None:
    prompts, completions, ends = answers(4)
    completions[0] = np.ones(CONTEXT - len(prompts[0]), np.int64)  # fits to the token
    completions[1], completions[2] = np.ones(CONTEXT, np.int64), np.empty(0, np.int64)
    before = judge(
        module, Meaning(), [prompts[0], prompts[3]], [completions[0], completions[3]], [[], []], 400
    )
    found = judge(module, Meaning(), prompts, completions, ends, 400)
    assert [v.status for v in found] == ["ok", "ungradable", "ungradable", "ok"]
    assert f"context of {CONTEXT}" in found[1].reason and "without a token" in found[2].reason
    assert [found[0].score, found[3].score] == pytest.approx([v.score for v in before], abs=1e-6)
    assert found[1].score is None
    broken = RewardModel(LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=1)).eval())
    with torch.no_grad():
        broken.model.score.weight.fill_(float("nan"))
    verdict = judge(broken, Meaning(), prompts[:1], completions[:1], ends[:1], 400)[0]
    assert (verdict.status, verdict.score) == ("error", None) and "nan" in verdict.reason


def test_loading_says_what_is_wrong(tmp_path: Path, module: RewardModel) -> None:
    module.model.save_pretrained(tmp_path / "good")
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "causal")
    LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=3)).save_pretrained(
        tmp_path / "three"
    )
    again = load_reward_model(str(tmp_path / "good"))
    assert torch.equal(again.model.score.weight, module.model.score.weight)
    fresh = load_reward_model(str(tmp_path / "causal"), trained=False)
    assert not fresh.model.score.weight.any()
    with pytest.raises(ModelError, match="causal: is no reward model.*train_orm"):
        load_reward_model(str(tmp_path / "causal"))
    with pytest.raises(ModelError, match="3 labels"):
        load_reward_model(str(tmp_path / "three"))
    with pytest.raises(ModelError, match="nothing"):
        load_reward_model(str(tmp_path / "nothing"))


def test_meaning_is_that_of_the_model_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    told = {"kind": "process", "probability": True, "steps": "newline"}
    (tmp_path / "config.json").write_text(json.dumps({KEY: told}))
    assert meaning(str(tmp_path), {"path": "x"}) == Meaning("process", True, "newline")
    assert meaning(str(tmp_path), {"kind": "outcome"}) == Meaning("outcome", True, "newline")
    assert meaning("some/hub-id", {}) == Meaning("outcome", False, "")
    with pytest.raises(ConfigError, match="kind of outcome or process"):
        meaning(str(tmp_path), {"kind": "good"})
