"""Batches, measures and losses of reward models, against hand-worked and float64 references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.records import GroupMeta
from learner.algorithms import reward_batches
from learner.algorithms.batching import BatchingError
from learner.algorithms.losses import pairwise_reward, pointwise_reward
from learner.evaluation import reward_models
from reward_service.models.labelled import Answers, of_samples


def answers(
    tokens: list[int],
    ends: list[list[int]],
    labels: list[list[float]],
    pair: list[int] | None = None,
    prompts: list[str] | None = None,
) -> Answers:
    n = len(tokens)
    return Answers(
        ["t"],
        np.zeros(n, np.int64),
        np.arange(n),
        np.array(tokens),
        prompts or [f"p{i}" for i in range(n)],
        ends,
        labels,
        np.array(pair or [-1] * n),
    )


# ---- losses ----


def test_pointwise_is_the_binary_cross_entropy_and_soft_labels_count() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 5.0], dtype=torch.float64, requires_grad=True)
    labels, weights = torch.tensor([1.0, 0.25, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.25, 0.0])
    loss, stats = pointwise_reward(logits, labels, weights)
    loss.backward()
    p = 1 / (1 + np.exp(-np.array([0.0, 2.0, -1.0])))
    each = -np.array([1, 0.25, 0]) * np.log(p) - np.array([0, 0.75, 1]) * np.log(1 - p)
    assert loss.item() == pytest.approx(float((each * [0.5, 0.25, 0.25]).sum()), abs=1e-12)
    # d/ds = w (sigmoid(s) - y), and nothing where the weight is 0
    assert logits.grad.tolist() == pytest.approx(
        [*((p - [1, 0.25, 0]) * [0.5, 0.25, 0.25]), 0.0], abs=1e-12
    )
    assert stats["reward_loss"].count == 3 and stats["reward_loss"].sum == pytest.approx(
        each.sum(), abs=1e-9
    )


def test_pairwise_is_bradley_terry() -> None:
    logits = torch.tensor([1.0, -1.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss, stats = pairwise_reward(logits, torch.zeros(4), torch.full((4,), 0.5))
    loss.backward()
    each = np.log1p(np.exp(-np.array([2.0, -3.0])))
    assert loss.item() == pytest.approx(0.5 * each.sum(), abs=1e-12)
    slope = -0.5 / (1 + np.exp(np.array([2.0, -3.0])))  # d/ds_chosen
    assert logits.grad.tolist() == pytest.approx(
        [slope[0], -slope[0], slope[1], -slope[1]], abs=1e-12
    )
    assert stats["reward_loss"].sum == pytest.approx(each.sum())
    assert stats["reward_loss"].count == 2


# ---- which answers ----


def test_draw_takes_the_share_of_replay_and_goes_through_everything() -> None:
    drawn = reward_batches.draw(fresh=9, old=5, batch=10, steps=20, replay=0.1, seed=3)
    assert len(drawn) == 20 and all(len(d) == 10 and (d >= 9).sum() == 1 for d in drawn)
    fresh = np.concatenate([d[d < 9] for d in drawn])
    old = np.concatenate([d[d >= 9] for d in drawn])
    assert set(np.bincount(fresh)) == {20} and set(np.bincount(old - 9)) == {
        4
    }  # whole epochs of each
    assert all(
        np.array_equal(a, b)
        for a, b in zip(drawn, reward_batches.draw(9, 5, 10, 20, 0.1, 3), strict=True)
    )
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(drawn, reward_batches.draw(9, 5, 10, 20, 0.1, 4), strict=True)
    )
    assert all((d < 9).all() and len(d) == 10 for d in reward_batches.draw(9, 0, 10, 3, 0.1, 0))
    with pytest.raises(ValueError, match="no answer of this iteration"):
        reward_batches.draw(0, 5, 10, 1, 0.1, 0)


def test_prompts_are_held_out_by_name_and_whole() -> None:
    names = [f"prompt-{i // 3}" for i in range(3000)]
    apart = reward_batches.held_out(names, 0.2)
    assert 0.15 < apart.mean() < 0.25
    assert all(len(set(apart[i : i + 3])) == 1 for i in range(0, 3000, 3))


def test_a_job_weighs_every_end_alike_whatever_the_ranks_and_the_budget() -> None:
    a = answers([5, 9, 4, 7], [[2], [1, 4, 6], [1], [3]], [[1.0], [1.0, 0.5, 0.0], [0.0], [1.0]])
    for ranks, budget in ((1, 40), (2, 9), (3, 18)):
        job = reward_batches.make_job(
            a, reward_batches.units(a, "pointwise"), "pointwise", ranks, budget, 4, 0.5
        )
        plan = job.plan.to_pylist()
        assert [r["step_ends"] for r in plan] == a.ends and [
            r["step_rewards"] for r in plan
        ] == a.labels
        assert {r["weight"] for r in plan} == {1 / 6} and (job.version, job.learning_rate) == (
            4,
            0.5,
        )
        for rank in range(ranks):
            for m in range(job.micro_batches):
                inside = [
                    a.tokens[i]
                    for i, r in enumerate(plan)
                    if (r["rank"], r["micro_batch"]) == (rank, m)
                ]
                assert len(inside) * max(inside, default=0) <= budget
    with pytest.raises(BatchingError, match="micro_batch_tokens=8"):
        reward_batches.make_job(a, reward_batches.units(a, "pointwise"), "pointwise", 1, 8)


def test_both_answers_of_a_pair_are_in_one_micro_batch_chosen_first() -> None:
    a = answers([5, 9, 4, 7, 3], [[1]] * 5, [[1.0], [0.0], [1.0], [0.0], [1.0]], [0, 0, 1, 1, -1])
    pairs = reward_batches.units(a, "pairwise")
    assert [u.tolist() for u in pairs] == [[0, 1], [2, 3]]
    job = reward_batches.make_job(a, [pairs[1], pairs[0]], "pairwise", 2, 18)
    plan = job.plan.to_pylist()
    assert [r["row"] for r in plan] == [2, 3, 0, 1] and {r["weight"] for r in plan} == {0.5}
    for first, second in ((0, 1), (2, 3)):
        assert all(plan[first][k] == plan[second][k] for k in ("rank", "micro_batch", "group_id"))
    with pytest.raises(BatchingError):  # 2 x 9 padded tokens
        reward_batches.make_job(a, pairs, "pairwise", 1, 17)


def meta(group: int, lengths: list[int]) -> GroupMeta:
    return GroupMeta(group, f"p{group}", 10, np.array(lengths), ("stop",) * len(lengths), 0, 0)


def test_samples_become_answers_and_those_without_a_verdict_are_left_out() -> None:
    metas = [meta(0, [3, 4, 5]), meta(1, [6, 7])]
    accuracy = np.array([1.0, np.nan, 0.0, 0.0, 0.0])
    a = of_samples(metas, ["x", "y"], accuracy)
    assert (a.table.tolist(), a.row.tolist(), a.tokens.tolist()) == (
        [0, 0, 1, 1],
        [0, 2, 0, 1],
        [13, 15, 16, 17],
    )
    assert a.ends == [[2], [4], [5], [6]] and a.labels == [[1.0], [0.0], [0.0], [0.0]]
    assert a.prompt_ids == ["p0", "p0", "p1", "p1"] and set(a.pair) == {-1}
    p = of_samples(metas, ["x", "y"], accuracy, pairs=True)
    assert (p.row.tolist(), p.labels, p.pair.tolist()) == ([0, 2], [[1.0], [0.0]], [0, 0])
    assert len(of_samples(metas, ["x", "y"], np.full(5, np.nan))) == 0


def test_joined_answers_keep_their_tables_and_pairs_apart() -> None:
    a = answers([5, 9], [[1], [1]], [[1.0], [0.0]], [0, 0])
    both = a + a
    assert (
        both.tables == ["t", "t"]
        and both.table.tolist() == [0, 0, 1, 1]
        and both.pair.tolist() == [0, 0, 1, 1]
    )
    picked = both.take(np.array([3, 0]))
    assert picked.table.tolist() == [1, 0] and picked.labels == [[0.0], [1.0]]


# ---- how good ----


def test_auc_is_the_share_of_pairs_in_order() -> None:
    assert reward_models.auc([0.9, 0.8, 0.1], [1, 0, 0]) == 1.0
    assert reward_models.auc([0.1, 0.8], [1, 0]) == 0.0
    assert reward_models.auc([0.5, 0.5, 0.7, 0.2], [1, 0, 0, 1]) == pytest.approx(
        (0.5 + 0 + 0 + 0) / 4
    )
    assert reward_models.auc([0.5, 0.2], [1, 1]) is None
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 20, 300), rng.integers(0, 2, 300)
    brute = np.mean(
        [(a > b) + 0.5 * (a == b) for a in scores[labels == 1] for b in scores[labels == 0]]
    )
    assert reward_models.auc(scores, labels) == pytest.approx(brute, abs=1e-12)


def test_calibration_error_by_hand() -> None:
    # bins 0-0.1: p 0.05, 0.05, half right: 0.45; bin 0.9-1: p 0.95, 1.0, both right: 0.025
    assert reward_models.calibration_error([0.05, 0.05, 0.95, 1.0], [1, 0, 1, 1]) == pytest.approx(
        0.5 * 0.45 + 0.5 * 0.025
    )


def test_measures_of_ends_and_of_pairs() -> None:
    a = answers([5, 9], [[1, 2], [3]], [[1.0, 0.0], [1.0]])
    found = reward_models.measure([[2.0, 1.0], [-1.0]], a, "pointwise")
    p = 1 / (1 + np.exp(-np.array([2.0, 1.0, -1.0])))
    assert found["accuracy"] == pytest.approx(1 / 3) and found["auc"] == pytest.approx(0.5)
    assert found["brier"] == pytest.approx(float(((p - [1, 0, 1]) ** 2).mean()))
    assert found["loss"] == pytest.approx(float(-np.log([p[0], 1 - p[1], p[2]]).mean()))
    pairs = answers([5, 9, 5, 9], [[1]] * 4, [[1.0], [0.0]] * 2, [0, 0, 1, 1])
    found = reward_models.measure([[2.0], [1.0], [0.0], [3.0]], pairs, "pairwise")
    assert found["accuracy"] == 0.5 and found["brier"] is None
    assert found["loss"] == pytest.approx((np.log1p(np.exp(-1)) + np.log1p(np.exp(3))) / 2)
