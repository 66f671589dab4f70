"""From scored groups to the learner's plan: GRPO by hand, masked rewards, filters, weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.records import PLAN, GroupMeta
from conf.schema import Config
from learner.algorithms.assemble import (
    Assembled,
    Scores,
    alive,
    assemble,
    in_learner,
    needs_logprobs,
)

NAN = math.nan


def config(**algorithm: object) -> Config:
    cfg = Config()
    cfg.learner.micro_batch_tokens = 1000
    for key, value in ({"beta": 0.0} | algorithm).items():
        setattr(cfg.algorithm, key, value)
    return cfg


def meta(group_id: int, lengths: list[int], reasons: list[str] | None = None) -> GroupMeta:
    return GroupMeta(
        group_id,
        f"p{group_id}",
        5,
        np.array(lengths),
        tuple(reasons or ["stop"] * len(lengths)),
        0,
        0,
    )


def scores(rewards: list[float], statuses: list[str] | None = None) -> Scores:
    statuses = statuses or ["ok"] * len(rewards)
    values = np.array(rewards)
    return Scores(
        values,
        values.copy(),
        values.copy(),
        np.array([s == "ok" for s in statuses]),
        statuses,
        [""] * len(rewards),
        [{}] * len(rewards),
        [""] * len(rewards),
        [None] * len(rewards),
        [None] * len(rewards),
    )


def columns(found: Assembled) -> dict[str, np.ndarray]:
    assert found.plan is not None and found.plan.schema.equals(PLAN)
    return {n: found.plan.column(n).to_numpy(zero_copy_only=False) for n in found.plan.schema.names}


def test_grpo_by_hand() -> None:
    """Group 10 has rewards 1 0 0 1 (mean 1/2, std 1/2).

    Group 11 has rewards 1 0 0 0 (mean 1/4, std sqrt(3)/4).
    """
    found = assemble(
        config(), [meta(10, [2, 4, 1, 3]), meta(11, [5, 5, 2, 1])], scores([1, 0, 0, 1, 1, 0, 0, 0])
    )
    plan = columns(found)
    root = math.sqrt(3)
    wanted = [1, -1, -1, 1, root, -1 / root, -1 / root, -1 / root]
    np.testing.assert_allclose(plan["advantage"], wanted, atol=1e-12)
    np.testing.assert_allclose(found.advantages, wanted, atol=1e-12)
    # Mean over the tokens of each answer, then over the 8 answers (DeepSeekMath eq. 3).
    np.testing.assert_allclose(
        plan["weight"], [1 / (8 * n) for n in (2, 4, 1, 3, 5, 5, 2, 1)], atol=1e-15
    )
    assert plan["table"].tolist() == [0] * 4 + [1] * 4
    assert plan["row"].tolist() == [0, 1, 2, 3] * 2
    assert found.kept.all() and found.reasons == ["", ""]
    assert found.micro_batches == (1,)


def test_the_plan_holds_nothing_a_token() -> None:
    sizes = [
        assemble(config(), [meta(0, [n, n, n, n])], scores([1, 0, 0, 1])).plan.nbytes
        for n in (1, 100)
    ]
    assert sizes[0] == sizes[1]


def test_rewards_that_are_not_ok_enter_no_baseline_and_weigh_nothing() -> None:
    good = assemble(config(), [meta(0, [2, 2, 2])], scores([1, 0, 0.5]))
    masked = assemble(
        config(),
        [meta(0, [2, 9, 2, 2, 7])],
        scores([1, NAN, 0, 0.5, 1e9], ["ok", "timeout", "ok", "ok", "error"]),
    )
    plan = columns(masked)
    np.testing.assert_allclose(plan["advantage"][[0, 2, 3]], columns(good)["advantage"], atol=1e-12)
    assert plan["advantage"][[1, 4]].tolist() == [0, 0] and plan["weight"][[1, 4]].tolist() == [
        0,
        0,
    ]
    np.testing.assert_allclose(
        plan["weight"][[0, 2, 3]], 1 / (3 * 2)
    )  # normalised by what is trained on
    assert masked.kept.tolist() == [True]


def test_a_group_without_any_ok_reward_is_left_out_whole_and_told() -> None:
    found = assemble(
        config(),
        [meta(4, [2, 2]), meta(5, [3, 3])],
        scores([NAN, NAN, 1, 0], ["error", "timeout", "ok", "ok"]),
    )
    assert found.kept.tolist() == [False, True]
    assert found.reasons == ["no sample with status ok", ""]
    plan = columns(found)
    assert plan["table"].tolist() == [1, 1]
    np.testing.assert_allclose(plan["weight"], 1 / (2 * 3))


def test_skip_dead_filters_whole_groups_and_renormalises() -> None:
    metas = [meta(1, [2, 2]), meta(2, [4, 1]), meta(3, [3, 3])]
    rewards = scores([0.1, 0.1, 1, 0, 0, 0])
    kept = assemble(config(filter="skip_dead"), metas, rewards)
    assert kept.kept.tolist() == [False, True, False] and kept.reasons == ["dead", "", "dead"]
    assert columns(kept)["table"].tolist() == [1, 1]
    np.testing.assert_allclose(columns(kept)["weight"], [1 / (2 * 4), 1 / 2])
    everything = assemble(config(), metas, rewards)
    assert everything.kept.all()
    # An all-equal group gives exactly zero, not something small (0.1 is not exact in binary).
    assert everything.advantages[[0, 1, 4, 5]].tolist() == [0.0] * 4


def test_nothing_left_to_train_on() -> None:
    found = assemble(config(filter="skip_dead"), [meta(1, [2, 2])], scores([1, 1]))
    assert found.plan is None and found.micro_batches == () and found.reasons == ["dead"]
    assert found.advantages.tolist() == [0, 0]


def test_mask_truncated_leaves_cut_answers_out_of_baseline_and_loss() -> None:
    found = assemble(
        config(mask_truncated=True),
        [meta(0, [2, 8, 2], ["stop", "length", "stop"])],
        scores([1, 0, 0]),
    )
    plan = columns(found)
    assert plan["weight"][1] == 0 and plan["advantage"][1] == 0
    np.testing.assert_allclose(plan["advantage"][[0, 2]], [1, -1], atol=1e-12)


@pytest.mark.parametrize(
    "normaliser, constant", [("sequence_mean", None), ("token_mean", None), ("constant", 88.0)]
)
def test_weights_belong_to_each_optimizer_step(normaliser: str, constant: float | None) -> None:
    """With several steps a batch, each is normalised by what it trains on (trl#5619)."""
    cfg = config(normaliser=normaliser, loss_constant=constant)
    cfg.learner.updates_per_batch = 2
    lengths = [[2, 4], [1, 3], [5, 5], [2, 1]]
    found = assemble(cfg, [meta(i, n) for i, n in enumerate(lengths)], scores([1, 0] * 4))
    plan = columns(found)
    assert plan["update"].tolist() == [0] * 4 + [1] * 4
    flat = np.concatenate(lengths)
    for u in (0, 1):
        mine = plan["update"] == u
        total = (plan["weight"][mine] * flat[mine]).sum()
        # The weights of all tokens of a step sum to 1 for means, and for a constant to
        # tokens / (answers x constant).
        assert total == pytest.approx(1.0 if constant is None else flat[mine].sum() / (4 * 88.0))


def test_filter_can_leave_fewer_groups_than_updates() -> None:
    cfg = config(filter="skip_dead")
    cfg.learner.updates_per_batch = 4
    found = assemble(cfg, [meta(i, [2, 2]) for i in range(4)], scores([1, 0, 1, 1, 0, 0, 0, 1]))
    assert len(found.micro_batches) == 2
    assert sorted(set(columns(found)["update"].tolist())) == [0, 1]


def test_splitting_over_ranks_changes_no_advantage_and_no_weight() -> None:
    metas, values = [meta(i, [3, 7, 2, 9]) for i in range(4)], scores([1, 0, 0, 1] * 4)
    one = columns(assemble(config(), metas, values))
    cfg = config()
    cfg.learner.ranks, cfg.learner.micro_batch_tokens = 2, 20
    found = assemble(cfg, metas, values)
    two = columns(found)
    assert (one["advantage"] == two["advantage"]).all() and (one["weight"] == two["weight"]).all()
    assert set(two["rank"].tolist()) == {0, 1} and found.micro_batches[0] > 1


def test_down_weight_counts_a_dead_group_a_tenth_in_sum_and_denominator() -> None:
    metas, values = [meta(1, [2, 2]), meta(2, [4, 1])], scores([1, 1, 1, 0])
    found = assemble(config(filter="down_weight", options={"dead_weight": 0.1}), metas, values)
    assert found.kept.all() and found.reasons == ["", ""]
    # Answers count 0.1, 0.1, 1, 1: together 2.2; each is a mean over its tokens.
    np.testing.assert_allclose(
        columns(found)["weight"], [0.1 / 2.2 / 2, 0.1 / 2.2 / 2, 1 / 2.2 / 4, 1 / 2.2]
    )
    tokens = assemble(config(filter="down_weight", normaliser="token_mean"), metas, values)
    np.testing.assert_allclose(
        columns(tokens)["weight"], np.array([0.1, 0.1, 1, 1]) / (0.1 * 4 + 5)
    )


def test_overlong_penalty_enters_the_rewards_before_the_baseline() -> None:
    """With budget 64 and share 0.25 the penalty grows over 16 tokens: 56 lose 0.5, 64 lose 1."""
    cfg = config(std_normalise=False, options={"overlong_share": 0.25})
    cfg.rollout.max_tokens = 64
    found = assemble(
        cfg, [meta(0, [48, 56, 64, 10])], scores([1, 1, 0, NAN], ["ok", "ok", "ok", "error"])
    )
    assert found.penalty.tolist() == [0, -0.5, -1, 0]
    assert columns(found)["reward"].tolist() == [1, 0.5, -1, 0]
    np.testing.assert_allclose(found.advantages, np.array([1, 0.5, -1, 1 / 6]) - 1 / 6, atol=1e-12)


def test_alive_counts_groups_to_learn_from_after_shaping() -> None:
    metas = [meta(7, [2, 2]), meta(3, [4, 1]), meta(5, [64, 10])]
    values = scores([1, 1, 1, 0, 1, 1])
    assert alive(config(), metas, values) == 1
    cfg = config(options={"overlong_share": 0.25})  # two right answers, one of them too long
    cfg.rollout.max_tokens = 64
    assert alive(cfg, metas, values) == 2


def test_filters_keep_the_order_of_the_groups_given() -> None:
    metas = [meta(9, [2, 2]), meta(2, [4, 1])]  # ids fall
    found = assemble(config(filter="skip_dead"), metas, scores([1, 1, 1, 0]))
    assert found.kept.tolist() == [False, True] and found.reasons == ["dead", ""]


def test_process_supervision_leaves_advantages_to_the_learner_and_sends_the_steps() -> None:
    cfg = config(advantage="process")
    assert in_learner(cfg.algorithm) and not needs_logprobs(cfg.algorithm)
    values = scores([1, 0])
    values.step_rewards[:], values.step_ends[:] = [[1.0, 0.0], [0.0]], [[1, 3], [2]]
    plan = assemble(cfg, [meta(0, [4, 3])], values).plan
    assert plan.column("step_rewards").to_pylist() == [[1.0, 0.0], [0.0]]
    assert plan.column("step_ends").to_pylist() == [[1, 3], [2]]
    assert np.isnan(plan.column("advantage").to_numpy()).all()
    assert assemble(config(), [meta(0, [4, 3])], values).plan.column("step_rewards").null_count == 2


def test_a_format_reward_makes_no_wrong_answer_right() -> None:
    """Online RFT with accuracy 1 + format 1: total 1 is a wrong answer in the right format."""
    values = scores([2, 1, 1, 0])
    values.accuracy[:] = [1, 0, 1, 0]
    assert assemble(
        config(advantage="correct"), [meta(0, [2, 2, 2, 2])], values
    ).advantages.tolist() == [1, 0, 1, 0]
