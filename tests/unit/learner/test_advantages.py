"""Advantages against loops from the papers' formulas, hand-worked numbers, and identities."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from conf.schema import AlgorithmConfig
from learner.algorithms import advantages as adv

SEEDS = range(8)


def ragged_batch(seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
    """Groups of 1 to 9 samples in shuffled order.

    Some rewards are not ok (nan), and some groups have equal rewards."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(rng.choice(10_000, 12, replace=False), rng.integers(1, 10, 12))
    rewards = rng.normal(size=len(groups)) * 3 + 1
    rewards[np.isin(groups, groups[:1])] = 0.1
    valid = rng.random(len(groups)) > 0.2
    rewards[~valid] = np.nan
    order = rng.permutation(len(groups))
    return rng, rewards[order], groups[order], valid[order]


def by_group(rewards, groups, valid):
    """Of every valid sample: its position, its reward, the valid rewards of its group."""
    for i in range(len(rewards)):
        if valid[i]:
            yield (
                i,
                rewards[i],
                [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]],
            )


def reference(name: str, rewards, groups, valid) -> np.ndarray:
    out = np.zeros(len(rewards))
    for i, r, members in by_group(rewards, groups, valid):
        n, mean = len(members), math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in members) / n)
        if n == 1 or len(set(members)) == 1:
            continue
        if name == "grpo":
            out[i] = (r - mean) / std
        elif name == "dr_grpo":
            out[i] = r - mean
        elif name == "rloo":
            out[i] = r - (math.fsum(members) - r) / (n - 1)
    return out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_equal_the_papers_formula_on_ragged_groups(name, seed):
    _, rewards, groups, valid = ragged_batch(seed)
    got = adv.SAMPLE_LEVEL[name](rewards, groups, valid)
    np.testing.assert_allclose(got, reference(name, rewards, groups, valid), rtol=0, atol=1e-9)
    assert (got[~valid] == 0).all()


def test_grpo_by_hand():
    # Group 5: rewards 1, 0, 0, 1: mean 1/2, std 1/2. Group 2: 3, 0, 0: mean 1, std sqrt 2.
    rewards = np.array([1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    groups = np.array([5, 2, 5, 2, 5, 2, 5])
    got = adv.grpo(rewards, groups, np.ones(7, bool))
    root = math.sqrt(2)
    np.testing.assert_allclose(got, [1, root, -1, -1 / root, -1, -1 / root, 1], atol=1e-12)


def test_two_answers_give_plus_and_minus_one_whatever_their_rewards():
    got = adv.grpo(np.array([0.3, 0.9]), np.array([1, 1]), np.array([True, True]))
    np.testing.assert_allclose(got, [-1, 1], atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.1 + 0.2, 1e-12, -7e9, 0.0])
def test_rewards_equal_up_to_rounding_give_exactly_zero(name, value):
    rewards = np.full(7, value)
    rewards[3:] = value * (1 + 2e-7)  # what sums in float32 do
    assert (adv.SAMPLE_LEVEL[name](rewards, np.zeros(7, int), np.ones(7, bool)) == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_of_one_graded_answer_gives_zero_and_is_counted(name):
    rewards, groups = np.array([5.0, np.nan, 1.0, 0.0]), np.array([1, 1, 2, 2])
    valid = np.array([True, False, True, True])
    got = adv.SAMPLE_LEVEL[name](rewards, groups, valid)
    assert got[0] == 0 and got[1] == 0 and got[2] == -got[3] != 0
    stats = adv.group_stats(rewards, groups, valid)
    assert stats.count.tolist() == [1, 2] and stats.alive.tolist() == [False, True]


@pytest.mark.parametrize("name", sorted(adv.SAMPLE_LEVEL))
def test_all_masked_and_empty_batches_give_zeros(name):
    assert (
        adv.SAMPLE_LEVEL[name](np.full(4, np.nan), np.array([1, 1, 2, 2]), np.zeros(4, bool)) == 0
    ).all()
    assert adv.SAMPLE_LEVEL[name](np.zeros(0), np.zeros(0, int), np.zeros(0, bool)).shape == (0,)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_masked_reward_never_enters_a_baseline(seed):
    _, rewards, groups, valid = ragged_batch(seed)
    alone = adv.grpo(rewards[valid], groups[valid], valid[valid])
    for junk in (np.nan, np.inf, 1e30):
        np.testing.assert_array_equal(
            adv.grpo(np.where(valid, rewards, junk), groups, valid)[valid], alone
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_is_g_over_g_minus_one_times_centred_reward(seed):
    _, rewards, groups, valid = ragged_batch(seed)
    size = np.array([valid[groups == g].sum() for g in groups])
    factor = np.where(size > 1, size / np.maximum(size - 1, 1), 0)
    np.testing.assert_allclose(
        adv.rloo(rewards, groups, valid),
        factor * adv.dr_grpo(rewards, groups, valid),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_pp_baseline_is_centred_by_group_and_scaled_by_batch(seed):
    _, rewards, groups, valid = ragged_batch(seed)
    centred, several = reference("dr_grpo", rewards, groups, valid), np.zeros(len(rewards), bool)
    for i, _, members in by_group(rewards, groups, valid):
        several[i] = len(members) > 1
    want = centred / np.std(centred[several])
    np.testing.assert_allclose(adv.reinforce_pp_baseline(rewards, groups, valid), want, atol=1e-9)


def test_a_nonfinite_reward_with_status_ok_is_refused():
    with pytest.raises(ValueError, match="reward nan of sample 1 has status ok"):
        adv.grpo(np.array([1.0, np.nan]), np.array([0, 0]), np.array([True, True]))
    with pytest.raises(ValueError, match="one shape"):
        adv.grpo(np.array([1.0, 2.0]), np.array([0]), np.array([True, True]))


# -- token level ----------------------------------------------------------------------------------


def test_process_supervision_by_hand():
    # All step rewards of the group: 1, 0, 1, 0, 0, 1 with mean 1/2, std 1/2: normalised +-1.
    steps = [np.array([1.0, 0.0, 1.0]), np.array([0.0, 0.0, 1.0])]
    ends = [np.array([1, 2, 4]), np.array([0, 2, 3])]
    got = adv.process(steps, ends, np.array([6, 4]), np.array([9, 9]), np.array([True, True]))
    np.testing.assert_allclose(
        got[0], [1, 1, 0, 1, 1, 0], atol=1e-12
    )  # steps +1, -1, +1; nothing after the last end
    np.testing.assert_allclose(got[1], [-1, 0, 0, 1], atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_process_supervision_equals_deepseekmath_4_1_3(seed):
    rng, _, groups, valid = ragged_batch(seed)
    lengths = rng.integers(1, 20, len(groups))
    ends = [np.sort(rng.choice(n, rng.integers(0, n + 1), replace=False)) for n in lengths]
    steps = [rng.normal(size=len(e)) for e in ends]
    got = adv.process(steps, ends, lengths, groups, valid)
    for i in range(len(groups)):
        mates = [j for j in range(len(groups)) if groups[j] == groups[i] and valid[j]]
        pool = np.concatenate([steps[j] for j in mates]) if mates else np.zeros(0)
        want = np.zeros(lengths[i])
        if valid[i] and sum(len(steps[j]) > 0 for j in mates) > 1:
            for t in range(lengths[i]):
                want[t] = sum(
                    (r - pool.mean()) / pool.std()
                    for r, e in zip(steps[i], ends[i], strict=True)
                    if e >= t
                )
        np.testing.assert_allclose(got[i], want, atol=1e-9)


def test_process_supervision_with_one_step_at_the_end_is_outcome_supervision():
    rewards, groups = np.array([1.0, 0.0, 0.0, 2.0, 5.0]), np.array([0, 0, 0, 1, 1])
    lengths = np.array([3, 1, 4, 2, 2])
    got = adv.process(
        [rewards[i : i + 1] for i in range(5)],
        [[n - 1] for n in lengths],
        lengths,
        groups,
        np.ones(5, bool),
    )
    want = adv.grpo(rewards, groups, np.ones(5, bool))
    for tokens, value in zip(got, want, strict=True):
        np.testing.assert_allclose(tokens, value, atol=1e-12)


def test_process_supervision_refuses_steps_outside_the_answer():
    with pytest.raises(ValueError, match=r"sample 0: 1 step rewards with ends \[3\].* in \[0, 3\)"):
        adv.process(
            [np.array([1.0])], [np.array([3])], np.array([3]), np.array([0]), np.array([True])
        )


def gae_reference(rewards, values, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l}, as a double sum; the value after the end is 0."""
    following = np.append(values[1:], 0.0)
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(len(rewards))]
    return np.array(
        [
            sum((gamma * lam) ** k * delta[t + k] for k in range(len(delta) - t))
            for t in range(len(delta))
        ]
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0)]
)
def test_gae_equals_its_double_sum_on_ragged_answers(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    lengths = [0, 1, *rng.integers(1, 12, 6)]
    rewards, values = [rng.normal(size=n) for n in lengths], [rng.normal(size=n) for n in lengths]
    got, targets = adv.gae(rewards, values, gamma, lam, value_lam=0.7)
    for i in range(len(lengths)):
        np.testing.assert_allclose(
            got[i], gae_reference(rewards[i], values[i], gamma, lam), atol=1e-9
        )
        want = gae_reference(rewards[i], values[i], gamma, 0.7) + values[i]
        np.testing.assert_allclose(targets[i], want, atol=1e-9)


def test_gae_limits_lambda_one_is_monte_carlo_minus_value_and_lambda_zero_the_td_error():
    rewards, values = [np.array([0.5, 0.0, 2.0])], [np.array([1.0, -1.0, 0.25])]
    one, target = adv.gae(rewards, values, gamma=0.5, lam=1.0)
    # Returns: 2; 0 + 0.5 * 2 = 1; 0.5 + 0.5 * 1 = 1.
    np.testing.assert_allclose(one[0], [1 - 1, 1 + 1, 2 - 0.25], atol=1e-12)
    np.testing.assert_allclose(target[0], [1, 1, 2], atol=1e-12)
    zero, _ = adv.gae(rewards, values, gamma=0.5, lam=0.0)
    np.testing.assert_allclose(zero[0], [0.5 - 0.5 - 1, 0.125 + 1, 2 - 0.25], atol=1e-12)


def test_gae_refuses_values_of_another_length():
    with pytest.raises(ValueError, match=r"a value a token: rewards have \[2\], values \[3\]"):
        adv.gae([np.zeros(2)], [np.zeros(3)])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_is_reward_to_go_with_k1_inside_normalised_over_the_batch(seed, gamma):
    rng, rewards, groups, valid = ragged_batch(seed)
    lengths = rng.integers(1, 8, len(groups))
    kl = [rng.normal(size=n) for n in lengths]
    cfg = AlgorithmConfig(
        advantage="reinforce_pp", beta=0.3, kl="k1", kl_placement="reward", gamma=gamma
    )
    got = adv.compute(cfg, rewards, groups, valid, lengths=lengths, kl=kl)
    returns = []
    for i, n in enumerate(lengths):
        token = [-0.3 * kl[i][t] + (rewards[i] if t == n - 1 else 0) for t in range(n)]
        returns.append([sum(gamma ** (s - t) * token[s] for s in range(t, n)) for t in range(n)])
    pool = np.concatenate([returns[i] for i in range(len(lengths)) if valid[i]])
    for i in range(len(lengths)):
        want = (
            (np.array(returns[i]) - pool.mean()) / pool.std() if valid[i] else np.zeros(lengths[i])
        )
        np.testing.assert_allclose(got[i], want, atol=1e-9)


def test_kl_in_the_reward_of_a_sample_level_advantage_subtracts_the_sum():
    cfg = AlgorithmConfig(advantage="rloo", beta=0.5, kl="k1", kl_placement="reward")
    rewards, groups, valid = np.array([1.0, 0.0]), np.array([0, 0]), np.array([True, True])
    # 1 - 0.5 * 2 = 0 and 0 - 0.5 * (-1) = 0.5: minus the other's.
    ragged = adv.compute(cfg, rewards, groups, valid, kl=[np.array([1.5, 0.5]), np.array([-1.0])])
    np.testing.assert_allclose(ragged, [-0.5, 0.5], atol=1e-12)
    np.testing.assert_array_equal(
        adv.compute(cfg, rewards, groups, valid, kl=np.array([2.0, -1.0])), ragged
    )


def test_ppo_advantages_are_whitened_gae_of_reward_at_the_last_token():
    cfg = AlgorithmConfig(advantage="gae", critic=True, lam=0.5, gamma=0.9)
    rewards, lengths = np.array([1.0, 0.0, np.nan]), np.array([3, 2, 2])
    values = [np.array([0.1, 0.4, 0.7]), np.array([0.5, -0.2]), np.array([9.0, 9.0])]
    valid = np.array([True, True, False])
    raw = [
        gae_reference([0, 0, 1.0], values[0], 0.9, 0.5),
        gae_reference([0, 0.0], values[1], 0.9, 0.5),
    ]
    pool = np.concatenate(raw)
    got = adv.compute(cfg, rewards, np.arange(3), valid, lengths=lengths, values=values)
    for i in range(2):
        np.testing.assert_allclose(got[i], (raw[i] - pool.mean()) / pool.std(), atol=1e-9)
    assert (got[2] == 0).all()
    plain = adv.compute(
        replace(cfg, std_normalise=False),
        rewards,
        np.arange(3),
        valid,
        lengths=lengths,
        values=values,
    )
    np.testing.assert_allclose(plain[0], raw[0], atol=1e-9)
    assert (plain[2] == 0).all()


def test_whiten_leaves_out_invalid_samples_and_gives_0_where_all_values_are_equal():
    rng = np.random.default_rng(0)
    tokens = [rng.normal(size=n) + 10 for n in (3, 0, 5, 1)]
    valid = np.array([True, True, True, False])
    flat = np.concatenate(tokens[:3])
    for got, raw in zip(adv.whiten(tokens, valid)[:3], tokens, strict=False):
        np.testing.assert_allclose(got, (raw - flat.mean()) / flat.std(), atol=1e-9)
    assert (adv.whiten(tokens, valid)[3] == 0).all()
    assert all(
        (t == 0).all() for t in adv.whiten([np.full(3, 0.1), np.full(2, 0.1)], np.ones(2, bool))
    )


def test_explained_variance_by_hand():
    returns = [np.array([0.0, 2.0]), np.array([4.0, 6.0])]
    assert adv.explained_variance(returns, returns) == 1.0
    assert adv.explained_variance(returns, [np.full(2, 7.0)] * 2) == 0.0
    # Errors 0, 0, 0, 2: variance 3/4; returns: variance 5.
    assert adv.explained_variance(returns, [returns[0], np.array([4.0, 4.0])]) == pytest.approx(
        1 - 0.75 / 5
    )
    assert math.isnan(adv.explained_variance([np.ones(3)], [np.zeros(3)]))


# -- preference, rejection sampling, shaping ------------------------------------------------------


def test_dpo_coefficient_is_that_of_deepseekmaths_appendix_times_beta():
    beta, ratios = 0.1, np.array([3.0, -2.0, 0.5, 0.5])  # log pi/pi_ref of o+, o-, o-, o+
    chosen, pairs = np.array([True, False, False, True]), np.array([8, 8, 3, 3])
    first = 1 / (1 + math.exp(-(beta * -2.0 - beta * 3.0)))  # sigma(beta log(o-) - beta log(o+))
    want = [beta * first, -beta * first, -beta * 0.5, beta * 0.5]
    np.testing.assert_allclose(adv.dpo(ratios, chosen, pairs, beta), want, atol=1e-12)
    cfg = AlgorithmConfig(advantage="dpo", data="pairs", beta=beta, kl="k1", kl_placement="reward")
    got = adv.compute(cfg, chosen.astype(float), pairs, np.ones(4, bool), log_ratios=ratios)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_dpo_refuses_what_is_not_a_pair():
    with pytest.raises(ValueError, match="pair 4 has 2 answers, 2 of them chosen"):
        adv.dpo(np.zeros(2), np.array([True, True]), np.array([4, 4]), 0.1)


def test_rft_coefficient_is_one_for_right_answers_only():
    rewards, valid = np.array([1.0, 0.0, 0.5, np.nan]), np.array([True, True, True, False])
    for name, want in (
        ("correct", [1, 0, 0, 0]),
        ("constant", [1, 1, 1, 0]),
        ("reward", [1, 0, 0.5, 0]),
    ):
        assert (
            adv.compute(AlgorithmConfig(advantage=name), rewards, np.arange(4), valid).tolist()
            == want
        )


def test_overlong_penalty_by_hand():
    got = adv.overlong_penalty(np.array([0, 80, 85, 90, 100, 120]), max_tokens=100, cache=20)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1], atol=1e-12)
    with pytest.raises(ValueError, match="cache=0"):
        adv.overlong_penalty(np.array([1]), 100, 0)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"advantage": "gae"}, "lengths"),
        ({"advantage": "process"}, "lengths"),
        ({"advantage": "dpo"}, "log_ratios"),
        ({"advantage": "grpo", "beta": 0.1, "kl_placement": "reward"}, "kl"),
        ({"advantage": "mean"}, "is not known: expected one of grpo"),
    ],
)
def test_compute_names_what_is_missing(fields, needed):
    name = fields["advantage"]
    with pytest.raises(ValueError, match=f"algorithm.advantage='?{name}'?.*{needed}"):
        adv.compute(AlgorithmConfig(**fields), np.zeros(2), np.zeros(2, int), np.ones(2, bool))
