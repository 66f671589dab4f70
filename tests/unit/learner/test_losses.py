"""Losses and their gradients against loops written from the papers' formulas in float64, TRL's
values, and the identities."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from conf.schema import AlgorithmConfig
from learner.algorithms import advantages, losses

SEEDS = range(4)
NEAR = {"atol": 1e-9, "rtol": 0}


def batch(seed: int, rows: int = 7, width: int = 9) -> dict[str, np.ndarray]:
    """Seeded float64 inputs with ratios on both sides of the clip bounds, one empty answer, lengths
    up to the width."""
    rng = np.random.default_rng(seed)
    logprobs = -3 * rng.random((rows, width))
    lengths = rng.integers(1, width + 1, rows)
    lengths[1] = 0
    return {
        "logprobs": logprobs,
        "old": logprobs + 0.4 * rng.normal(size=logprobs.shape),
        "ref": logprobs + 0.5 * rng.normal(size=logprobs.shape),
        "behaviour": logprobs + 0.5 * rng.normal(size=logprobs.shape),
        "entropy": rng.random(logprobs.shape),
        "adv": rng.normal(size=logprobs.shape),
        "lengths": lengths,
        "valid": np.arange(rows) != 3,
        "mask": np.arange(width)[None] < lengths[:, None],
    }


def ours(cfg, b, **changes):
    """(loss, gradient with respect to logprobs, stats) of the code under test."""
    b = b | changes
    t = {k: torch.as_tensor(v) for k, v in b.items()}
    weights = losses.sample_weights(cfg.normaliser, b["lengths"], b["valid"], cfg.loss_constant)
    logprobs = t["logprobs"].clone().requires_grad_()
    loss, stats = losses.policy_loss(
        cfg,
        logprobs,
        t["old"],
        t["adv"],
        torch.as_tensor(weights),
        t["mask"],
        t["ref"],
        t["entropy"],
        t["behaviour"],
    )
    loss.backward()
    return loss.item(), logprobs.grad.numpy(), stats


def reference(cfg, b) -> tuple[float, np.ndarray]:
    """Loss and gradient in plain loops: each token's loss and its derivative by the papers'
    formulas."""
    used = [i for i in range(len(b["lengths"])) if b["valid"][i] and b["lengths"][i] > 0]
    total, gradient = 0.0, np.zeros_like(b["logprobs"])
    tokens = sum(int(b["lengths"][i]) for i in used)
    for i in used:
        n = int(b["lengths"][i])
        weight = {
            "sequence_mean": 1 / (len(used) * n),
            "token_mean": 1 / tokens,
            "constant": 1 / (len(used) * (cfg.loss_constant or 1)),
        }[cfg.normaliser]
        sequence_ratio = math.exp(sum(b["logprobs"][i, t] - b["old"][i, t] for t in range(n)) / n)
        for t in range(n):
            logprob, a = b["logprobs"][i, t], b["adv"][i, t] if b["adv"].ndim == 2 else b["adv"][i]
            rho = sequence_ratio if cfg.loss == "gspo" else math.exp(logprob - b["old"][i, t])
            low, high = 1 - cfg.eps_low, 1 + cfg.eps_high
            if cfg.loss in ("ppo_clip", "gspo"):
                value = -min(rho * a, min(max(rho, low), high) * a)
                # The clipped branch is flat; it is taken above for a > 0 and below for a < 0.
                slope = 0.0 if (a > 0 and rho > high) or (a < 0 and rho < low) else -rho * a
                if cfg.dual_clip and a < 0 and value > -cfg.dual_clip * a:
                    value, slope = -cfg.dual_clip * a, 0.0
            elif cfg.loss == "cispo":
                value, slope = (
                    -min(max(rho, low), high) * a * logprob,
                    -min(max(rho, low), high) * a,
                )
            else:
                value, slope = -a * logprob, -a
            if cfg.tis_cap:
                tis = min(math.exp(b["old"][i, t] - b["behaviour"][i, t]), cfg.tis_cap)
                value, slope = value * tis, slope * tis
            if cfg.beta and cfg.kl_placement == "loss":
                d = logprob - b["ref"][i, t]
                ratio = math.exp(logprob - b["old"][i, t])
                k3 = math.exp(-d) - 1 + d
                kl, dkl = {
                    "k2": (d * d / 2, d),
                    "k3": (k3, 1 - math.exp(-d)),
                    "k3_iw": (ratio * k3, ratio * (k3 + 1 - math.exp(-d))),
                }[cfg.kl]
                value, slope = value + cfg.beta * kl, slope + cfg.beta * dkl
            total += weight * (value - cfg.entropy_coef * b["entropy"][i, t])
            gradient[i, t] += weight * slope
    return total, gradient


CONFIGS = {
    "grpo": AlgorithmConfig(beta=0.04),
    "grpo_k2": AlgorithmConfig(beta=0.3, kl="k2"),
    "grpo_k3_iw": AlgorithmConfig(beta=0.3, kl="k3_iw"),
    "dapo": AlgorithmConfig(normaliser="token_mean", eps_high=0.28),
    "dr_grpo": AlgorithmConfig(normaliser="constant", loss_constant=17.0),
    "dual_clip": AlgorithmConfig(dual_clip=1.5),
    "tis": AlgorithmConfig(tis_cap=1.2, beta=0.1),
    "entropy": AlgorithmConfig(entropy_coef=0.01),
    "reinforce": AlgorithmConfig(loss="reinforce", normaliser="token_mean"),
    "sft": AlgorithmConfig(loss="sft", normaliser="token_mean"),
    "cispo": AlgorithmConfig(loss="cispo", normaliser="token_mean", eps_low=1.0, eps_high=0.3),
    "cispo_two_sided": AlgorithmConfig(loss="cispo", eps_low=0.2, eps_high=0.3, tis_cap=2.0),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_equal_the_papers_formula(name, seed):
    b, cfg = batch(seed), CONFIGS[name]
    loss, gradient, _ = ours(cfg, b)
    want_loss, want_gradient = reference(cfg, b)
    assert loss == pytest.approx(want_loss, abs=1e-9)
    np.testing.assert_allclose(gradient, want_gradient, **NEAR)
    assert (gradient[~b["mask"]] == 0).all() and (
        gradient[3] == 0
    ).all()  # padding, and the answer that is not valid


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_gspo_loss_and_gradient_equal_its_sequence_formula(seed, dual_clip):
    b = batch(seed)
    b["adv"] = b["adv"][:, 0]
    cfg = AlgorithmConfig(loss="gspo", eps_low=0.03, eps_high=0.04, dual_clip=dual_clip)
    loss, gradient, _ = ours(cfg, b)
    want_loss, want_gradient = reference(cfg, b)
    assert loss == pytest.approx(want_loss, abs=1e-9)
    np.testing.assert_allclose(gradient, want_gradient, **NEAR)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "sft"])
def test_whatever_lies_in_the_padding_changes_nothing(name, seed):
    b, cfg = batch(seed), CONFIGS[name]
    clean = ours(cfg, b)
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        dirty = {
            k: np.where(b["mask"], b[k], junk)
            for k in ("logprobs", "old", "ref", "behaviour", "entropy", "adv")
        }
        loss, gradient, stats = ours(cfg, b, **dirty)
        assert loss == clean[0] and (gradient == clean[1]).all() and stats == clean[2]


def test_a_row_of_weight_zero_is_in_no_statistic_and_cannot_spoil_the_loss():
    b, cfg = batch(0), AlgorithmConfig(beta=0.1)
    clean = ours(cfg, b)
    assert clean[2]["ratio"].count == b["lengths"][b["valid"]].sum() < b["lengths"].sum()
    dirty = {
        k: np.where(b["valid"][:, None], b[k], np.nan) for k in ("logprobs", "old", "ref", "adv")
    }
    loss, gradient, stats = ours(cfg, b, **dirty)
    assert loss == clean[0] and (gradient == clean[1]).all() and stats == clean[2]


def test_clip_edges_by_hand():
    cfg = AlgorithmConfig(eps_low=0.25, eps_high=0.5)
    ratios = np.array([[0.5, 0.75, 1.0, 1.5, 2.0]])
    for sign, want in ((1.0, [0.5, 0.75, 1.0, 1.5, 1.5]), (-1.0, [-0.75, -0.75, -1.0, -1.5, -2.0])):
        b = batch(0, rows=4, width=5)
        b = {k: v[:1] for k, v in b.items()} | {
            "lengths": np.array([5]),
            "valid": np.array([True]),
            "mask": np.ones((1, 5), bool),
        }
        b |= {"old": np.zeros((1, 5)), "logprobs": np.log(ratios), "adv": np.array([sign])}
        loss, gradient, stats = ours(cfg, b)
        assert loss == pytest.approx(-sum(want) / 5, abs=1e-12)
        flat = [4] if sign > 0 else [0]
        assert (gradient[0, flat] == 0).all() and gradient[0, 2] == pytest.approx(-sign / 5)
        counted = "clip_fraction_high" if sign > 0 else "clip_fraction_low"
        other = "clip_fraction_low" if sign > 0 else "clip_fraction_high"
        assert (stats[counted].sum, stats[counted].count) == (1.0, 5.0) and stats[
            other
        ].sum == 0  # a bound that does not bind is not counted
        assert astuple(stats["ratio"]) == pytest.approx((5.75, 5.0, 0.5, 2.0))


def test_all_masked_gives_loss_zero_and_no_statistics():
    b = batch(0)
    loss, gradient, stats = ours(
        AlgorithmConfig(), b, mask=np.zeros_like(b["mask"]), valid=np.zeros(7, bool)
    )
    assert loss == 0 and (gradient == 0).all() and stats == {}


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_wild_log_ratios_stay_finite(loss):
    b = batch(0)
    cfg = AlgorithmConfig(loss=loss, beta=0.1, tis_cap=2.0)
    value, gradient, _ = ours(
        cfg, b, old=b["logprobs"] - 1000, ref=b["logprobs"] + 1000, behaviour=b["logprobs"] + 1000
    )
    assert math.isfinite(value) and np.isfinite(gradient).all()


def test_missing_inputs_and_unknown_losses_are_named():
    one = torch.zeros(1, 1)
    for fields, message in (
        ({"beta": 0.1}, "beta > 0 with kl_placement=loss needs ref_logprobs"),
        ({"tis_cap": 2.0}, "tis_cap needs behaviour_logprobs"),
        ({"entropy_coef": 0.1}, "entropy_coef needs entropy"),
        ({"loss": "hinge"}, "algorithm.loss='hinge' is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            losses.policy_loss(
                AlgorithmConfig(**fields), one, one, torch.zeros(1), torch.ones(1), torch.ones(1, 1)
            )


# -- identities ------------------------------------------------------------------------------------


def test_on_policy_every_ratio_loss_has_the_gradient_of_reinforce():
    b = batch(1)
    b["adv"] = b["adv"][:, 0]
    _, want, _ = ours(AlgorithmConfig(loss="reinforce"), b)
    for loss in ("ppo_clip", "gspo", "cispo"):
        _, gradient, stats = ours(AlgorithmConfig(loss=loss), b, old=b["logprobs"])
        np.testing.assert_allclose(gradient, want, atol=1e-14)
        assert (
            stats["clip_fraction_low"].sum == stats["clip_fraction_high"].sum == 0
            and stats["kl_old"].sum == 0
        )
    _, gradient, _ = ours(AlgorithmConfig(), b, old=b["logprobs"])
    logprobs = torch.tensor(b["logprobs"], requires_grad=True)
    weights = torch.as_tensor(losses.sample_weights("sequence_mean", b["lengths"], b["valid"]))
    loss, _ = losses.policy_loss(
        AlgorithmConfig(), logprobs, None, torch.tensor(b["adv"]), weights, torch.tensor(b["mask"])
    )
    loss.backward()
    np.testing.assert_array_equal(
        logprobs.grad.numpy(), gradient
    )  # old_logprobs=None means on-policy


def test_gspo_of_one_token_answers_is_ppo():
    b = batch(2)
    one = {"lengths": np.minimum(b["lengths"], 1), "mask": b["mask"] & (np.arange(9) == 0)}
    ppo, gspo = (ours(AlgorithmConfig(loss=loss), b, **one) for loss in ("ppo_clip", "gspo"))
    assert gspo[0] == pytest.approx(ppo[0], abs=1e-12)
    np.testing.assert_allclose(gspo[1], ppo[1], atol=1e-12)


def test_grpo_without_std_and_length_terms_is_dr_grpo():
    rng, groups, valid = np.random.default_rng(0), np.repeat([1, 2], 4), np.ones(8, bool)
    rewards = rng.random(8)
    np.testing.assert_array_equal(
        advantages.compute(AlgorithmConfig(std_normalise=False), rewards, groups, valid),
        advantages.dr_grpo(rewards, groups, valid),
    )
    lengths = rng.integers(1, 9, 8)
    grpo, dr = (
        losses.sample_weights(n, lengths, valid, 11.0) for n in ("sequence_mean", "constant")
    )
    np.testing.assert_allclose(
        grpo * lengths, dr * 11.0, rtol=1e-14
    )  # what is left once 1/|o| and 1/c are gone


def test_rft_is_sft_on_the_right_answers():
    b = batch(3)
    right = np.array([1.0, 0, 1, 1, 0, 0, 1])
    sft = AlgorithmConfig(loss="sft", normaliser="constant", loss_constant=1.0)
    rft = replace(sft, loss="reinforce")
    kept = (b["valid"] & (right == 1) & (b["lengths"] > 0)).sum() / (
        b["valid"] & (b["lengths"] > 0)
    ).sum()
    _, want, _ = ours(sft, b, adv=np.ones(7), valid=b["valid"] & (right == 1))
    _, got, _ = ours(rft, b, adv=right)
    np.testing.assert_allclose(got, want * kept, atol=1e-12)


@pytest.mark.parametrize("average", [False, True])
def test_dpo_through_its_coefficient_has_the_gradient_of_the_dpo_loss(average):
    b = batch(4, rows=6)
    lengths = np.array([3, 5, 2, 9, 4, 4])
    b |= {
        "lengths": lengths,
        "valid": np.ones(6, bool),
        "mask": np.arange(9)[None] < lengths[:, None],
    }
    chosen, pairs, beta = (
        np.array([True, False, False, True, True, False]),
        np.array([0, 0, 1, 1, 2, 2]),
        0.7,
    )
    scale = 1 / lengths if average else np.ones(6)
    theta = torch.tensor(b["logprobs"], requires_grad=True)
    answer = ((theta - torch.tensor(b["ref"])) * torch.tensor(b["mask"])).sum(-1) * torch.tensor(
        scale
    )
    win, lose = answer[chosen], answer[~chosen]
    margin = beta * (win - lose)
    value = -torch.log(1 / (1 + torch.exp(-margin))).mean()
    value.backward()
    coefficient = advantages.dpo(answer.detach().numpy(), chosen, pairs, beta)
    normaliser = (
        {"normaliser": "sequence_mean"}
        if average
        else {"normaliser": "constant", "loss_constant": 0.5}
    )
    _, gradient, _ = ours(AlgorithmConfig(loss="reinforce", **normaliser), b, adv=coefficient)
    factor = 2 if average else 1  # sequence_mean divides by answers, of which a pair has two
    np.testing.assert_allclose(gradient * factor, theta.grad.numpy(), **NEAR)


# -- weights ---------------------------------------------------------------------------------------


def test_weights_by_hand():
    lengths, valid = np.array([2, 4, 5, 0]), np.array([True, True, False, True])
    for normaliser, constant, want in (
        ("sequence_mean", None, [1 / 4, 1 / 8, 0, 0]),
        ("token_mean", None, [1 / 6, 1 / 6, 0, 0]),
        ("constant", 10.0, [1 / 20, 1 / 20, 0, 0]),
    ):
        np.testing.assert_allclose(
            losses.sample_weights(normaliser, lengths, valid, constant), want, rtol=1e-15
        )
    assert (losses.sample_weights("token_mean", lengths, np.zeros(4, bool)) == 0).all()


def test_weights_refuse_bad_settings():
    with pytest.raises(ValueError, match="algorithm.normaliser='mean' is not known"):
        losses.sample_weights("mean", np.ones(1), np.ones(1))
    for constant in (None, 0.0, -1.0):
        with pytest.raises(ValueError, match=f"algorithm.loss_constant={constant}"):
            losses.sample_weights("constant", np.ones(1), np.ones(1), constant)


# -- critic ----------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    # Values 1, 3, 0 of old 0, 3, 0, returns 0, 1, 5; clip 0.5: clipped value 0.5 only for the
    # first. Squares: max(1, 0.25), max(4, 4); the third token is masked.
    values = torch.tensor([[1.0, 3.0, 0.0]], dtype=torch.float64, requires_grad=True)
    old, returns = (
        torch.tensor([[0.0, 3.0, 0.0]]).double(),
        torch.tensor([[0.0, 1.0, 5.0]]).double(),
    )
    mask = torch.tensor([[1, 1, 0]])
    loss, stats = losses.value_loss(values, old, returns, torch.tensor([0.5]), mask, 0.5)
    loss.backward()
    assert loss.item() == 0.5 * 0.5 * 5 and values.grad.tolist() == [[0.5, 1.0, 0.0]]
    assert astuple(stats["value_loss"])[:2] == (2.5, 2.0)
    assert astuple(stats["value_clip_fraction"])[:2] == (0.0, 2.0)
    # Return 2 instead of 0: |1 - 2| = 1 but |0.5 - 2| = 1.5 is larger: the clipped branch, without
    # gradient.
    values.grad = None
    returns[0, 0] = 2.0
    loss, stats = losses.value_loss(values, old, returns, torch.tensor([0.5]), mask, 0.5)
    loss.backward()
    assert loss.item() == 0.25 * (2.25 + 4) and values.grad.tolist() == [[0.0, 1.0, 0.0]]
    assert astuple(stats["value_clip_fraction"])[:2] == (1.0, 2.0)
    plain, stats = losses.value_loss(values, old, returns, torch.tensor([0.5]), mask, None)
    assert plain.item() == 0.25 * (1 + 4) and "value_clip_fraction" not in stats


# -- TRL -------------------------------------------------------------------------------------------

TRL_CASES = ("grpo", "grpo_k3_iw", "grpo_two_sided", "grpo_tis", "dapo", "dr_grpo", "gspo", "cispo")


@pytest.mark.parametrize("name", TRL_CASES)
def test_same_loss_and_gradient_as_trl(name, data_dir):
    record = json.loads((data_dir / "trl_losses.json").read_text())
    assert record["trl"].startswith("1.16.") and set(record["cases"]) == set(TRL_CASES)
    t = {k: np.array(v) for k, v in record["inputs"].items()}
    case = record["cases"][name]
    lengths = t["mask"].sum(1).astype(int)
    b = {
        "logprobs": t["logprobs"],
        "old": t["old_logprobs"],
        "ref": t["ref_logprobs"],
        "adv": t["advantages"],
    }
    b |= {
        "behaviour": t["behaviour_logprobs"],
        "entropy": np.zeros_like(t["mask"]),
        "mask": t["mask"],
    }
    loss, gradient, _ = ours(
        AlgorithmConfig(**case["volley"]), b | {"lengths": lengths, "valid": lengths > 0}
    )
    assert loss == pytest.approx(case["loss"], abs=1e-9)
    np.testing.assert_allclose(gradient, case["gradient"], **NEAR)
