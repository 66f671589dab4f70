"""KL divergence between policy and reference, from samples and exactly.

With x ~ policy, ``d = log policy(x) - log ref(x)`` and ``r = exp(-d) = ref/policy`` (Schulman, "Approximating KL
divergence", 2020):

=======  ===================  ===========================  =====================================================
kind     value                as a number                  as a *loss* its gradient, on-policy, is
=======  ===================  ===========================  =====================================================
k1       d                    unbiased, any sign           grad log pi, whose mean is 0: noise (use in reward)
k2       d^2 / 2              biased, >= 0                 d grad log pi: the reverse KL(policy || ref)
k3       r - 1 + d            unbiased, >= 0, low variance (1 - r) grad log pi: the forward KL(ref || policy)
k3_iw    (pi/pi_old) * k3     unbiased for x ~ pi_old      that of the reverse KL, for x ~ pi_old (DeepSeek-V3.2)
=======  ===================  ===========================  =====================================================

k1 in the reward (detached) also follows the reverse KL: the score-function estimator multiplies it by grad log pi.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: still finite in every float type when squared, far past any useful ratio
KINDS = ("k1", "k2", "k3", "k3_iw")


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-MAX_LOG_RATIO, so that one wild token cannot make the step infinite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    kind: str, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(policy || ref), same shape and dtype as ``logprobs``; differentiable in ``logprobs``.

    ``old_logprobs`` (of the policy that sampled the tokens) is needed by ``k3_iw`` only.
    Raises ValueError for an unknown kind or a missing ``old_logprobs``.
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()
    if kind not in KINDS:
        raise ValueError(f"algorithm.kl={kind!r} is not known: expected one of {', '.join(KINDS)}")
    # expm1 keeps k3 >= 0 near d = 0, where r - 1 + d cancels.
    clamped = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.expm1(-clamped) + clamped
    if kind == "k3":
        return k3
    if old_logprobs is None:
        raise ValueError(
            "algorithm.kl=k3_iw needs the old log-probs of the sampled tokens, and none were given"
        )
    return safe_exp(logprobs - old_logprobs) * k3


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(policy || ref) over the full vocabulary: logits [..., V] of both give [...]. A diagnostic for a few
    rows."""
    logp = torch.log_softmax(logits, dim=-1)
    logq = torch.log_softmax(ref_logits, dim=-1)
    # A token of probability 0 contributes 0, not 0 * inf.
    return torch.where(logp.isneginf(), 0.0, logp.exp() * (logp - logq)).sum(-1)
