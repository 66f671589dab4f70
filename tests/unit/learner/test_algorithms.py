"""YAML files and documentation agree; the split of a batch does not change a gradient."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from conf.schema import AlgorithmConfig
from learner.algorithms import advantages, losses, parts, regimes, table

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "conf" / "algorithm").glob("*.yaml"))
NAMES = [
    *("sft", "rft", "online_rft", "dpo", "ppo", "grpo", "grpo_process", "rloo", "reinforce_pp"),
    *("reinforce_pp_baseline", "dr_grpo", "dapo", "gspo", "cispo"),
]


def load(name: str) -> AlgorithmConfig:
    """conf/algorithm/NAME.yaml over the typed schema, as a run composes it."""
    schema = OmegaConf.structured(AlgorithmConfig)
    root = OmegaConf.create({"rollout": {"max_tokens": 64}, "algorithm": schema})
    root.algorithm = OmegaConf.merge(
        schema, OmegaConf.load(ROOT / "conf" / "algorithm" / f"{name}.yaml")
    )
    return OmegaConf.to_object(root)["algorithm"]


def test_every_name_has_a_yaml_file():
    assert sorted(f.stem for f in FILES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_file_names_parts_that_fit_and_says_what_the_documentation_needs(name):
    cfg = load(name)
    parts.check(cfg)
    assert cfg.name == name
    assert cfg.source and cfg.rewards and cfg.coefficient
    assert cfg.group_baseline == (
        cfg.advantage in {"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "process"}
    )


def test_figures_of_the_papers_are_in_the_yaml_files():
    dapo, gspo, dr, ppo, cispo = (load(n) for n in ("dapo", "gspo", "dr_grpo", "ppo", "cispo"))
    assert (dapo.eps_low, dapo.eps_high, dapo.beta, dapo.filter) == (0.2, 0.28, 0.0, "resample")
    assert (gspo.eps_low, gspo.eps_high) == (3e-4, 4e-4)
    assert dr.loss_constant == 64.0 and not dr.std_normalise  # rollout.max_tokens
    assert ppo.critic and load("grpo").beta == 0.04 and cispo.eps_low == 1.0


@pytest.mark.parametrize(
    ("marks", "written"),
    [
        (table.ALGORITHMS_MARKS, table.algorithms_table()),
        (table.OPTIONS_MARKS, table.options_table()),
    ],
    ids=["algorithms", "options"],
)
def test_the_documented_tables_are_those_of_the_files(marks, written):
    text = (ROOT / "docs" / "algorithms.md").read_text()
    documented = text.split(marks[0])[1].split(marks[1])[0].strip()
    assert documented == written, "run python -m learner.algorithms.table"


def test_the_table_has_a_row_for_each_algorithm_and_none_for_a_recipe():
    rows = table.algorithms_table().splitlines()[2:]
    assert sorted(row.split("`")[1] for row in rows) == sorted(NAMES)
    assert any("A of GRPO times s = (pi/pi_old)(o)^(1/\\|o\\|)" in row for row in rows)


def test_a_new_algorithm_is_one_function_and_one_yaml_file(tmp_path, monkeypatch):
    """The function is a sample-level advantage, the file one that builds upon GRPO's."""
    monkeypatch.setitem(advantages.SAMPLE_LEVEL, "signed", None)  # taken out again after the test

    @advantages.sample_level
    def signed(rewards, groups, valid):
        return np.sign(advantages.grpo(rewards, groups, valid))

    shutil.copy(ROOT / "conf" / "algorithm" / "grpo.yaml", tmp_path)
    (tmp_path / "signed_grpo.yaml").write_text(
        "defaults:\n  - grpo\n  - _self_\nname: signed_grpo\nadvantage: signed\n"
        "source: made up\ncoefficient: sign of A of GRPO\nbeta: 0.0\n"
    )
    cfg = OmegaConf.to_object(table.settings(tmp_path / "signed_grpo.yaml"))
    parts.check(cfg)
    rewards, groups = np.array([3.0, 0.0, 0.0]), np.zeros(3, int)
    got = advantages.compute(cfg, rewards, groups, np.ones(3, bool))
    assert got.tolist() == [1, -1, -1]
    assert table.algorithms_table(tmp_path).splitlines()[-1] == (
        "| `signed_grpo` | current policy | rule or outcome model | sign of A of GRPO | none "
        "| sequence_mean | made up |"
    )


def test_the_documented_parts_are_those_that_exist():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    names = (
        *advantages.names(),
        *losses.LOSSES,
        *losses.NORMALISERS,
        *parts.DATA,
        *regimes.FILTERS,
    )
    settings = (f.name for f in fields(AlgorithmConfig) if f.name != "options")
    for name in (*names, *settings, *parts.OPTIONS):
        assert f"`{name}`" in text, name


def test_write_table_replaces_only_what_stands_between_the_marks(tmp_path):
    file = tmp_path / "a.md"
    one, two = table.ALGORITHMS_MARKS, table.OPTIONS_MARKS
    file.write_text(f"before\n{one[0]}\nold\n{one[1]}\nbetween\n{two[0]}\n{two[1]}\nafter\n")
    table.write(file)
    assert file.read_text() == (
        f"before\n{one[0]}\n{table.algorithms_table()}\n{one[1]}\nbetween\n"
        f"{two[0]}\n{table.options_table()}\n{two[1]}\nafter\n"
    )
    file.write_text("no marks")
    with pytest.raises(ValueError, match="expected the lines"):
        table.write(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage": "mean"}, "algorithm.advantage='mean' is not known: expected one of grpo"),
        ({"loss": "hinge"}, "algorithm.loss='hinge' is not known"),
        ({"filter": "drop"}, "algorithm.filter='drop' is not known"),
        (
            {"options": {"clip_value": 1}},
            "algorithm.options.clip_value='clip_value' is not known: expected one of",
        ),
        ({"beta": 0.1, "kl": "k1"}, "kl=k1 with kl_placement=loss: its gradient has mean 0"),
        (
            {"beta": 0.1, "kl": "k3", "kl_placement": "reward"},
            "kl=k3 with kl_placement=reward: .* set algorithm.kl=k1",
        ),
        ({"critic": True}, "critic=True with advantage=grpo"),
        (
            {"advantage": "gae"},
            "critic=False with advantage=gae: advantage=gae needs algorithm.critic=true",
        ),
        ({"advantage": "dpo"}, "data=policy with advantage=dpo"),
        ({"advantage": "dpo", "data": "pairs"}, "beta=0.0 with advantage=dpo"),
        ({"advantage": "dr_grpo"}, "std_normalise=true with advantage=dr_grpo"),
        ({"dual_clip": 1.1}, "dual_clip=1.1: expected more than 1 \\+ eps_high = 1.2"),
        ({"tis_cap": 0.0}, "tis_cap=0.0: expected more than 0"),
        ({"gamma": 1.1}, "gamma=1.1: expected in \\[0, 1\\]"),
        ({"lam": -0.1}, "lam=-0.1: expected in \\[0, 1\\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_the_setting_named(fields, message):
    with pytest.raises(ValueError, match=message):
        parts.check(AlgorithmConfig(**fields))


# -- the gradient does not depend on how work is split --------------------------------------------


def step(name: str) -> tuple[AlgorithmConfig, dict[str, np.ndarray]]:
    """The samples of one optimizer step, with the algorithm's own advantages.

    They are twelve answers in groups of unequal sizes, of which one is not graded."""
    rng, cfg = np.random.default_rng(7), load(name)
    groups = (
        np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
        if name == "dpo"
        else np.repeat([3, 9, 4, 6], [4, 1, 5, 2])
    )
    lengths, valid = rng.integers(1, 10, 12), np.arange(12) != (99 if name == "dpo" else 6)
    rewards = np.where(valid, np.arange(12) % 2, np.nan)
    draw = [rng.normal(size=n) for n in lengths]
    ends = [np.arange(n) for n in lengths]
    got = advantages.compute(
        cfg,
        rewards,
        groups,
        valid,
        lengths=lengths,
        kl=draw,
        step_rewards=draw,
        step_ends=ends,
        values=draw,
        log_ratios=rng.normal(size=12),
    )
    adv = np.zeros((12, 10))
    for i, a in enumerate(got):
        adv[i, : lengths[i]] = a
    logprobs = -3 * rng.random((12, 10))
    others = {
        k: logprobs + 0.3 * rng.normal(size=logprobs.shape) for k in ("old", "ref", "behaviour")
    }
    weights = losses.sample_weights(cfg.normaliser, lengths, valid, cfg.loss_constant)
    mask = np.arange(10)[None] < lengths[:, None]
    return cfg, others | {"logprobs": logprobs, "adv": adv, "weights": weights, "mask": mask}


def gradient(
    cfg: AlgorithmConfig, data: dict, rows: np.ndarray, pad_left: int, pad_right: int
) -> tuple[float, np.ndarray]:
    """Loss and gradient of some rows as one micro-batch, padded on either side with junk."""

    def padded(key: str, junk: float) -> torch.Tensor:
        return torch.tensor(
            np.pad(
                data[key][rows].astype(float), ((0, 0), (pad_left, pad_right)), constant_values=junk
            )
        )

    logprobs = padded("logprobs", np.nan).requires_grad_()
    rest = [padded(k, np.nan) for k in ("old", "adv")]
    loss, _ = losses.policy_loss(
        cfg,
        logprobs,
        *rest,
        torch.tensor(data["weights"][rows]),
        padded("mask", 0.0),
        padded("ref", np.nan),
        behaviour_logprobs=padded("behaviour", np.nan),
    )
    loss.backward()
    return loss.item(), logprobs.grad.numpy()[:, pad_left : pad_left + data["logprobs"].shape[1]]


@pytest.mark.parametrize("tis_cap", [None, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_same_for_any_micro_batches_order_and_padding(name, tis_cap):
    cfg, data = step(name)
    cfg = replace(cfg, tis_cap=tis_cap)
    want_loss, want = gradient(cfg, data, np.arange(12), 0, 0)
    assert np.abs(want).max() > 0
    rng = np.random.default_rng(1)
    for sizes in ([1] * 12, [5, 7], [2, 9, 1], [12]):
        order, total, got, start = rng.permutation(12), 0.0, np.zeros_like(want), 0
        for size in sizes:
            rows = order[start : start + size]
            loss, got[rows] = gradient(cfg, data, rows, *rng.integers(0, 4, 2))
            total, start = total + loss, start + size
        assert total == pytest.approx(want_loss, abs=1e-12)
        np.testing.assert_allclose(got, want, atol=1e-13)
