"""Bias, variance and gradient of the KL estimators, measured on two known distributions."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms import kl

VOCABULARY = 50


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy near its reference, as in training (KL about 0.01 nats)."""
    draw = torch.Generator().manual_seed(1)
    ref = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64)
    return ref + 0.15 * torch.randn(VOCABULARY, generator=draw, dtype=torch.float64), ref


def logs(logits: torch.Tensor) -> torch.Tensor:
    return logits - torch.logsumexp(logits, -1)


def moments(kind: str, logits: torch.Tensor, ref: torch.Tensor) -> tuple[float, float]:
    """Exact mean and variance of the estimator under the policy: a sum over the whole vocabulary,
    no sampling noise."""
    p = logs(logits).exp()
    x = kl.kl_estimate(kind, logs(logits), logs(ref))
    mean = (p * x).sum()
    return mean.item(), (p * (x - mean) ** 2).sum().item()


def test_estimators_by_hand():
    policy, ref = (
        torch.tensor([0.5, 0.2], dtype=torch.float64).log(),
        torch.tensor([0.25, 0.6], dtype=torch.float64).log(),
    )
    ratio = [0.5, 3.0]
    for kind, value in {
        "k1": [0.6931471805599453, -1.0986122886681098],
        "k2": [0.2402265069591007, 1.0986122886681098**2 / 2],
        "k3": [0.5 - 1 + 0.6931471805599453, 3 - 1 - 1.0986122886681098],
    }.items():
        torch.testing.assert_close(
            kl.kl_estimate(kind, policy, ref),
            torch.tensor(value, dtype=torch.float64),
            atol=1e-9,
            rtol=0,
        )
    old = torch.tensor([0.25, 0.4], dtype=torch.float64).log()  # pi/pi_old = 2, 1/2
    want = [2 * (ratio[0] - 1 + 0.6931471805599453), 0.5 * (ratio[1] - 1 - 1.0986122886681098)]
    got = kl.kl_estimate("k3_iw", policy, ref, old)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-9, rtol=0)


def test_k3_is_unbiased_never_negative_and_of_several_times_smaller_variance_than_k1(pair):
    policy, ref = pair
    true = kl.exact_kl(policy, ref).item()
    p = logs(policy).exp()
    assert (
        true == pytest.approx((p * (logs(policy) - logs(ref))).sum().item(), abs=1e-12)
        and 0.003 < true < 0.03
    )
    (k1, var1), (k2, var2), (k3, var3) = (moments(k, policy, ref) for k in ("k1", "k2", "k3"))
    assert k1 == pytest.approx(true, abs=1e-12) and k3 == pytest.approx(true, abs=1e-12)
    assert abs(k2 - true) > 1e-5  # biased, if little
    assert var1 > 5 * var3 and var1 > 5 * var2
    values = {k: kl.kl_estimate(k, logs(policy), logs(ref)) for k in ("k1", "k2", "k3")}
    assert (values["k1"] < 0).any() and (values["k2"] >= 0).all() and (values["k3"] >= 0).all()


def test_the_same_holds_for_averages_of_samples(pair):
    policy, ref = pair
    draw = torch.Generator().manual_seed(2)
    x = torch.multinomial(logs(policy).exp(), 200_000, replacement=True, generator=draw)
    k1, k3 = (kl.kl_estimate(k, logs(policy)[x], logs(ref)[x]) for k in ("k1", "k3"))
    true = kl.exact_kl(policy, ref)
    for k in (k1, k3):
        assert abs(k.mean() - true) < 4 * k.std() / len(x) ** 0.5
    assert k1.var() > 5 * k3.var()


def test_k3_has_the_larger_variance_far_from_the_reference():
    # A token of probability 0.001 where the reference has 1/2: r = 500 is a tail that the logarithm
    # has not.
    policy, ref = (
        torch.tensor([0.999, 0.001], dtype=torch.float64).log(),
        torch.tensor([0.5, 0.5], dtype=torch.float64).log(),
    )
    assert moments("k3", policy, ref)[1] > moments("k1", policy, ref)[1]


def loss_gradient(
    kind: str, policy: torch.Tensor, ref: torch.Tensor, sampler: torch.Tensor
) -> torch.Tensor:
    """E over x ~ sampler of the gradient of the estimator taken as a loss, the sampling itself not
    differentiated."""
    theta = policy.clone().requires_grad_()
    x = kl.kl_estimate(kind, logs(theta), logs(ref), logs(sampler))
    (logs(sampler).exp() * x).sum().backward()
    return theta.grad


def exact_gradient(policy: torch.Tensor, ref: torch.Tensor, forward: bool) -> torch.Tensor:
    theta = policy.clone().requires_grad_()
    p, q = logs(theta), logs(ref)
    ((q.exp() * (q - p)) if forward else (p.exp() * (p - q))).sum().backward()
    return theta.grad


def test_gradient_as_a_loss_k1_none_k2_reverse_k3_forward(pair):
    policy, ref = pair[0] * 2, pair[1]
    reverse, forward = exact_gradient(policy, ref, False), exact_gradient(policy, ref, True)
    assert (reverse - forward).abs().max() > 1e-3  # the two differ here, or the test could not tell
    near = {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close(
        loss_gradient("k1", policy, ref, policy), torch.zeros_like(policy), **near
    )
    torch.testing.assert_close(loss_gradient("k2", policy, ref, policy), reverse, **near)
    torch.testing.assert_close(loss_gradient("k3", policy, ref, policy), forward, **near)
    torch.testing.assert_close(loss_gradient("k3_iw", policy, ref, policy), reverse, **near)


def test_importance_weighted_k3_is_unbiased_in_value_and_gradient_for_samples_of_another_policy(
    pair,
):
    policy, ref = pair
    sampler = ref.flip(0)
    value = (
        logs(sampler).exp() * kl.kl_estimate("k3_iw", logs(policy), logs(ref), logs(sampler))
    ).sum()
    assert value.item() == pytest.approx(kl.exact_kl(policy, ref).item(), abs=1e-12)
    got = loss_gradient("k3_iw", policy, ref, sampler)
    torch.testing.assert_close(got, exact_gradient(policy, ref, False), atol=1e-12, rtol=0)


def test_k1_in_the_reward_follows_the_reverse_kl(pair):
    policy, ref = pair
    theta = policy.clone().requires_grad_()
    detached = kl.kl_estimate("k1", logs(policy), logs(ref))
    (logs(policy).exp() * detached * logs(theta)).sum().backward()  # E of coefficient * grad log pi
    torch.testing.assert_close(theta.grad, exact_gradient(policy, ref, False), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_iw"])
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_wild_log_ratios_stay_finite_in_value_and_gradient(kind, gap):
    policy = torch.tensor([gap], dtype=torch.float32, requires_grad=True)
    value = kl.kl_estimate(kind, policy, torch.zeros(1), torch.zeros(1))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(policy.grad).all()


def test_k3_keeps_its_digits_where_policy_and_reference_almost_agree():
    d = torch.tensor([1e-4], dtype=torch.float32)
    value = kl.kl_estimate("k3", d, torch.zeros(1))
    assert value.item() == pytest.approx(
        5e-9, rel=0.01
    )  # d^2/2; r - 1 in float32 is off by up to 3e-8


def test_exact_kl_takes_probability_zero():
    policy = torch.tensor([0.0, float("-inf")], dtype=torch.float64)
    assert kl.exact_kl(policy, torch.zeros(2, dtype=torch.float64)).item() == pytest.approx(
        0.6931471805599453
    )


def test_bad_input_is_named():
    with pytest.raises(
        ValueError, match="algorithm.kl='k4' is not known: expected one of k1, k2, k3, k3_iw"
    ):
        kl.kl_estimate("k4", torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="k3_iw needs the old log-probs"):
        kl.kl_estimate("k3_iw", torch.zeros(1), torch.zeros(1))
