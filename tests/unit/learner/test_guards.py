"""Warnings against values chosen by hand: each begins at its bound, comes once, and may recur."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import pytest

from conf.schema import GuardsConfig
from learner.evaluation.guards import check

Values = dict[str, float]


def run(steps: Iterable[Values], **settings: float) -> list[list[str]]:
    """What is told after each step; the state goes through JSON, as in a checkpoint."""
    cfg, state, told = GuardsConfig(**settings), {}, []
    for values in steps:
        state, begun = check(cfg, state, values)
        state = json.loads(json.dumps(state))
        told.append(begun)
    return told


def entropy(*values: float, accuracy: float | None = 0.0) -> list[Values]:
    return [
        {"actor/entropy": v} | ({} if accuracy is None else {"reward/accuracy": accuracy})
        for v in values
    ]


def length(*values: float) -> list[Values]:
    return [{"response_length/mean": v, "response_length/clip_ratio": 0.0} for v in values]


def test_entropy_is_told_once_an_episode_with_its_numbers():
    told = run(entropy(2.0, 0.3, 0.19, 0.1, 0.5, 0.15))  # 10 % of the first is 0.2
    assert [len(t) for t in told] == [0, 0, 1, 0, 0, 1]
    assert (
        "0.19 nats" in told[2][0]
        and "first step's 2" in told[2][0]
        and "0% of answers are right" in told[2][0]
    )
    assert "guards.entropy_share=0.1" in told[2][0] and "optimizer.lr" in told[2][0]


def test_a_policy_that_has_learned_is_sure_and_that_is_no_fault():
    assert run(entropy(0.34, 0.02, accuracy=0.95)) == [[], []]
    assert run(entropy(0.34, 0.02, accuracy=0.5)) == [[], []]
    assert [len(t) for t in run(entropy(0.34, 0.02, accuracy=0.49))] == [0, 1]
    assert [len(t) for t in run(entropy(0.34, 0.02, accuracy=None))] == [
        0,
        1,
    ]  # no grades: entropy alone decides
    assert run(entropy(0.34, 0.0), entropy_share=0.0) == [[], []]


def test_length_counts_growth_within_the_window_only():
    slow = [
        10.0 * 1.2**i for i in range(12)
    ]  # doubles within 4 steps, is 7.4 times as long after 11
    assert not any(run(length(*slow), length_window=4))
    told = run(length(10, 12, 15, 31, 32, 33, 34, 35), length_window=2)
    assert [len(t) for t in told] == [0, 0, 0, 0, 0, 0, 0, 0]  # 31 / 12 and 32 / 15 are under 3
    told = run(length(10, 10, 29, 31, 100, 100, 100), length_window=2)
    assert [len(t) for t in told] == [0, 0, 0, 1, 0, 0, 0]  # 31 / 10 begins it, 100 / 29 goes on
    assert "31 tokens" in told[3][0] and "10 of 2 steps before" in told[3][0]
    assert not any(run(length(1, 100), length_factor=0.0))


def test_answers_cut_at_the_budget():
    told = run(
        [
            {"response_length/mean": 60.0, "response_length/clip_ratio": r}
            for r in (0.5, 0.51, 0.9, 0.2, 0.6)
        ]
    )
    assert [len(t) for t in told] == [0, 1, 0, 0, 1]
    assert "51% of answers are cut at rollout.max_tokens" in told[1][0]


def test_skipped_steps():
    told = run([{"actor/skipped_steps": s} for s in (0.0, 2.0, 1.0, 0.0, 1.0)])
    assert [len(t) for t in told] == [0, 1, 0, 0, 1] and told[1][0].startswith(
        "2 optimizer steps were skipped"
    )


@pytest.mark.parametrize(
    "absent", [{}, {"actor/entropy": math.nan, "response_length/mean": math.nan}]
)
def test_a_step_that_tells_nothing_changes_nothing(absent: Values):
    """A step whose groups were all left out has no entropy. It neither ends an episode nor counts
    as the first value.
    """
    told = run([absent, *entropy(1.0, 0.05), absent, *entropy(0.05, 0.5, 0.05)])
    assert [len(t) for t in told] == [0, 0, 1, 0, 0, 0, 1]


def judged(scores: Iterable[float], right: Iterable[float], model: str = "orm") -> list[Values]:
    return [
        {f"reward_gap/{model}": s - a, "reward/accuracy": a}
        for s, a in zip(scores, right, strict=True)
    ]


def test_a_model_whose_score_rises_while_accuracy_falls_is_told_once_the_window_is_full():
    scores, right = (
        (0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.68),
        (0.6, 0.6, 0.5, 0.5, 0.5, 0.4, 0.5, 0.5, 0.3),
    )
    told = run(judged(scores, right), reward_window=4)
    # Changes of the means of the two halves (score, accuracy), from the fourth step on:
    # (0.05, -0.1), (0.1, -0.05), (0.05, -0.05), (0, -0.05), (0, 0.05), (0.04, -0.05).
    assert [len(t) for t in told] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert (
        "reward model orm" in told[3][0]
        and "rose by 0.05" in told[3][0]
        and "changed by -0.1" in told[3][0]
    )
    assert "guards.reward_gap=0.1" in told[3][0] and "reward_model.every" in told[3][0]
    told = run(judged(scores, right), reward_window=4, reward_gap=0.06)
    assert [len(t) for t in told] == [
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        0,
        1,
    ]  # goes on until nothing rises, and comes again
    assert run(judged(scores, right), reward_window=4, reward_gap=0.0) == [[]] * 9


def test_a_score_that_rises_with_accuracy_is_no_fault_whatever_its_scale():
    assert run(judged((1, 2, 3, 4), (0.1, 0.2, 0.3, 0.4)), reward_window=4) == [[]] * 4
    assert (
        run(judged((0.9, 0.9, 0.8, 0.8), (0.9, 0.9, 0.3, 0.3)), reward_window=4) == [[]] * 4
    )  # it sees the fall
    told = run(judged((1, 1, 2, 2), (0.4, 0.4, 0.4, 0.4)), reward_window=4)  # accuracy stalls
    assert [len(t) for t in told] == [0, 0, 0, 1]


def test_a_step_without_gold_answers_counts_for_nothing():
    steps = judged((0.1, 0.1, 0.4, 0.4), (0.5, 0.5, 0.4, 0.4))
    blind = [
        {"reward_gap/orm": 0.9, "reward/accuracy": math.nan},
        {"reward_gap/orm": 0.9},
        {"reward_gap/orm": math.nan, "reward/accuracy": 0.5},
    ]
    assert [len(t) for t in run([*steps[:2], *blind, *steps[2:]], reward_window=4)] == [
        0,
        0,
        0,
        0,
        0,
        0,
        1,
    ]
    two = [
        a | b for a, b in zip(steps, judged((0.5,) * 4, (0.5, 0.5, 0.4, 0.4), "prm"), strict=True)
    ]
    assert "reward model orm" in run(two, reward_window=4)[3][0]
