"""Warnings against values chosen by hand: each begins where its bound says, is told once, and may come again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import pytest

from learner.config import GuardsConfig
from learner.guards import check

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
    return [{"actor/entropy": v} | ({} if accuracy is None else {"reward/accuracy": accuracy}) for v in values]


def length(*values: float) -> list[Values]:
    return [{"response_length/mean": v, "response_length/clip_ratio": 0.0} for v in values]


def test_entropy_is_told_once_an_episode_with_its_numbers():
    told = run(entropy(2.0, 0.3, 0.19, 0.1, 0.5, 0.15))  # 10 % of the first is 0.2
    assert [len(t) for t in told] == [0, 0, 1, 0, 0, 1]
    assert "0.19 nats" in told[2][0] and "first step's 2" in told[2][0] and "0% of answers are right" in told[2][0]
    assert "guards.entropy_share=0.1" in told[2][0] and "optimizer.lr" in told[2][0]


def test_a_policy_that_has_learned_is_sure_and_that_is_no_fault():
    assert run(entropy(0.34, 0.02, accuracy=0.95)) == [[], []]
    assert run(entropy(0.34, 0.02, accuracy=0.5)) == [[], []]
    assert [len(t) for t in run(entropy(0.34, 0.02, accuracy=0.49))] == [0, 1]
    assert [len(t) for t in run(entropy(0.34, 0.02, accuracy=None))] == [0, 1]  # no grades: entropy alone decides
    assert run(entropy(0.34, 0.0), entropy_share=0.0) == [[], []]


def test_length_counts_growth_within_the_window_only():
    slow = [10.0 * 1.2**i for i in range(12)]  # doubles within 4 steps, is 7.4 times as long after 11
    assert not any(run(length(*slow), length_window=4))
    told = run(length(10, 12, 15, 31, 32, 33, 34, 35), length_window=2)
    assert [len(t) for t in told] == [0, 0, 0, 0, 0, 0, 0, 0]  # 31 / 12 and 32 / 15 are under 3
    told = run(length(10, 10, 29, 31, 100, 100, 100), length_window=2)
    assert [len(t) for t in told] == [0, 0, 0, 1, 0, 0, 0]  # 31 / 10 begins it, 100 / 29 goes on
    assert "31 tokens" in told[3][0] and "10 of 2 steps before" in told[3][0]
    assert not any(run(length(1, 100), length_factor=0.0))


def test_answers_cut_at_the_budget():
    told = run([{"response_length/mean": 60.0, "response_length/clip_ratio": r} for r in (0.5, 0.51, 0.9, 0.2, 0.6)])
    assert [len(t) for t in told] == [0, 1, 0, 0, 1]
    assert "51% of answers are cut at rollout.max_tokens" in told[1][0]


def test_skipped_steps():
    told = run([{"actor/skipped_steps": s} for s in (0.0, 2.0, 1.0, 0.0, 1.0)])
    assert [len(t) for t in told] == [0, 1, 0, 0, 1] and told[1][0].startswith("2 optimizer steps were skipped")


@pytest.mark.parametrize("absent", [{}, {"actor/entropy": math.nan, "response_length/mean": math.nan}])
def test_a_step_that_tells_nothing_changes_nothing(absent: Values):
    """A step whose groups were all left out has no entropy: neither an end of an episode nor the first value."""
    told = run([absent, *entropy(1.0, 0.05), absent, *entropy(0.05, 0.5, 0.05)])
    assert [len(t) for t in told] == [0, 0, 1, 0, 0, 0, 1]


def gap(*values: float) -> list[Values]:
    return [{"reward_gap/orm": v} for v in values]


def test_a_model_reward_that_parts_from_gold_is_told_once_the_window_is_full():
    told = run(gap(0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.45, 0.6), reward_window=4)
    # means of the halves: 0.1 and 0.25; 0.15 and 0.3; 0.25 and 0.3: together again; 0.3 and 0.375; 0.3 and 0.525
    assert [len(t) for t in told] == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert "reward model orm" in told[3][0] and "gained 0.15 more than accuracy" in told[3][0]
    assert "guards.reward_gap=0.1" in told[3][0] and "reward_model.every" in told[3][0]
    assert run(gap(0.1, 0.1, 0.2, 0.3), reward_window=4, reward_gap=0.0) == [[]] * 4
    assert run(gap(0.5, 0.4, 0.3, 0.2), reward_window=4) == [[]] * 4  # accuracy gains more: no fault
