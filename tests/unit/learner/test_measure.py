"""The metrics of a step from per-sample scalars, by hand; every name has a definition."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from actors.records import GroupMeta
from cluster.monitoring.metrics import find
from cluster.monitoring.stat import Stat
from learner.algorithms.assemble import Assembled, Scores
from learner.evaluation.step_metrics import evaluation, reward_metrics, step_metrics

NAN = math.nan


def group(
    group_id: int, lengths: list[int], reasons: list[str], low: int, high: int
) -> SimpleNamespace:
    return SimpleNamespace(
        meta=GroupMeta(group_id, f"p{group_id}", 10, np.array(lengths), tuple(reasons), low, high)
    )


@pytest.fixture
def values() -> dict[str, float | Stat]:
    groups = [group(0, [3, 5], ["stop", "length"], 4, 5), group(1, [1, 7], ["stop", "stop"], 5, 5)]
    scores = Scores(
        rewards=np.array([1.0, 0.0, 0.5, NAN]),
        accuracy=np.array([1.0, 0.0, 0.0, NAN]),
        format=np.array([1.0, NAN, 1.0, NAN]),
        valid=np.array([True, True, True, False]),
        statuses=["ok", "ok", "ok", "timeout"],
        extracted=["1", "2", "3", ""],
        parts=[
            {"accuracy": 1.0},
            {"accuracy": 0.0},
            {"accuracy": 0.0, "format": 0.5},
            {"accuracy": 1.0},
        ],
        reasons=["", "", "", "slow"],
        step_rewards=[None] * 4,
        step_ends=[None] * 4,
    )
    batch = Assembled(
        None,
        (1,),
        np.array([1.0, -1.0, 0.0, 0.0]),
        np.array([True, True]),
        ["", ""],
        {0: "learnable", 1: "undetermined"},
        np.zeros(4),
    )
    result = {"stats": {"loss": Stat(0.6, 1.0, 0.2, 0.4), "entropy": Stat(8.0, 4.0, 1.0, 3.0),
                        "mismatch": Stat(4e-6, 4.0, 0.0, 2e-6)},
              "steps": [{"grad_norm": 1.0, "skipped": 0.0, "learning_rate": 1e-3},
                        {"grad_norm": 3.0, "skipped": 1.0, "learning_rate": 2e-3}]}  # fmt: skip
    return step_metrics(
        groups,
        scores,
        batch,
        result,
        {"probe_max_abs_diff": 3e-6, "bytes": 64.0},
        {"gen": 1.5},
        6,
        {"admitted": 4, "trained": 2, "filtered": 0, "in_flight": 1, "queued": 1},
        {"generator": 1},
    )


def test_every_name_is_defined(values: dict[str, float | Stat]) -> None:
    for name in values:
        find(name)


def test_values_by_hand(values: dict[str, float | Stat]) -> None:
    assert values["response_length"] == Stat(16, 4, 1, 7)
    assert values["response_length/clip_ratio"] == 0.25  # one of four ended by length
    assert values["perf/total_num_tokens"] == 16 + 4 * 10
    assert values["reward"] == Stat(1.5, 3, 0, 1)  # the time-out is no zero
    assert values["reward/timeout_share"] == 0.25 and values["reward/ok_share"] == 0.75
    assert values["reward/error_share"] == 0
    assert values["reward/accuracy"] == Stat(1, 3, 0, 1)
    assert values["reward/format"] == Stat(2, 2, 1, 1)
    assert values["reward_part/accuracy"] == Stat(1, 3, 0, 1)  # of ok samples only
    assert values["reward_part/format"] == Stat(0.5, 1, 0.5, 0.5)
    assert values["reward/group_std"] == Stat(0.5, 2, 0, 0.5)
    assert values["reward/zero_std_share"] == 0.5
    assert values["groups/in_flight"] == 1 and values["generator/restarts"] == 1
    assert values["regime/learnable"] == 0.5


def test_staleness_counts_from_the_version_that_was_trained(
    values: dict[str, float | Stat],
) -> None:
    """This step published version 6, so it trained version 5. The groups begun at versions 4 and 5
    have staleness 1 and 0.
    """
    assert values["training/policy_version"] == 6
    assert values["training/staleness"] == Stat(1, 2, 0, 1)


def test_learner_values(values: dict[str, float | Stat]) -> None:
    assert values["actor/loss"] == pytest.approx(0.3)  # per optimizer step
    assert values["actor/grad_norm"] == Stat(4, 2, 1, 3)
    assert values["actor/skipped_steps"] == 1
    assert values["actor/lr"] == 2e-3
    assert values["actor/entropy"] == Stat(8, 4, 1, 3)
    assert values["training/rollout_logprob_diff"] == Stat(4e-6, 4, 0, 2e-6)
    assert values["sync/logprob_max_abs_diff"] == 3e-6


def judged() -> tuple[list[SimpleNamespace], Scores]:
    """Two groups of four. "prm" scores all answers, "orm" all but two. One answer has no gold
    answer, and the last one is not ok.
    """
    accuracy = np.array([1.0, 0.0, 0.0, NAN, 0.0, 1.0, 1.0, 1.0])
    orm = [0.9, 0.5, None, 0.3, 0.7, 0.4, 0.5, None]
    parts = [{"prm": 0.5} | ({} if s is None else {"orm": s}) for s in orm]
    statuses = ["ok"] * 7 + ["error"]
    scores = Scores(
        rewards=np.array([0.0] * 7 + [NAN]),
        accuracy=accuracy,
        format=np.full(8, NAN),
        valid=np.array([s == "ok" for s in statuses]),
        statuses=statuses,
        extracted=list("5665" * 2),
        parts=parts,
        reasons=[""] * 8,
        step_rewards=[None] * 8,
        step_ends=[None] * 8,
    )
    groups = [group(i, [3] * 4, ["stop"] * 4, 0, 0) for i in range(2)]
    for i, g in enumerate(groups):
        g.prompt = SimpleNamespace(prompt_id=f"p{i}")
    return groups, scores


def test_the_gap_is_that_of_answers_with_both_by_hand() -> None:
    groups, scores = judged()
    values = reward_metrics([g.meta for g in groups], scores, ["orm", "prm", "absent"])
    assert values["reward_gap/orm"] == pytest.approx((-0.1 + 0.5 + 0.7 - 0.6 - 0.5) / 5)
    assert values["reward_gap/prm"] == pytest.approx((3 * 0.5 - 3 * 0.5) / 6)
    assert values["reward_part/orm"] == Stat.of([0.9, 0.5, 0.3, 0.7, 0.4, 0.5])
    assert "reward_gap/absent" not in values
    find("reward_gap/orm")


@pytest.mark.parametrize("samples, n", [(2, 2), (4, 4), (64, 16)])
def test_models_choose_among_16_or_as_many_as_there_are(samples: int, n: int) -> None:
    groups, scores = judged()
    found = evaluation(groups, scores, samples, ["orm", "prm"])
    assert {k for k in found if "/" in k} == {
        f"{kind}@{n}/{m}" for kind in ("best", "weighted_maj") for m in ("orm", "prm")
    }
    assert f"maj@{n}" in found
    if n == 2:
        # The first two answers of each group are graded and scored. Votes without a model count all
        # graded answers.
        assert (found["best@2/orm"], found["weighted_maj@2/orm"], found["maj@2"]) == (
            0.5,
            0.5,
            (1 + 1 / 2) / 2,
        )
    for name in found:
        find(f"eval/{name}")
    assert not {k for k in evaluation(groups, scores, samples) if "best" in k}
