"""KL divergence between policy and reference, from samples and exactly.

For a sample x of the policy let ``d = log policy(x) - log ref(x)`` and
``r = exp(-d) = ref/policy``.
The estimators are those of Schulman, "Approximating KL divergence" (2020), and k3_iw is
DeepSeek-V3.2's:

=====  ================  ============================  ==========================================
kind   value             as a number                   gradient as a *loss*, on-policy
=====  ================  ============================  ==========================================
k1     d                 unbiased, any sign            grad log pi, whose mean is 0: noise
k2     d^2 / 2           biased, >= 0                  d grad log pi: reverse KL(policy || ref)
k3     r - 1 + d         unbiased, >= 0, low variance  (1 - r) grad log pi: forward KL(ref||policy)
k3_iw  (pi/pi_old) * k3  unbiased for x ~ pi_old       that of the reverse KL, for x ~ pi_old
=====  ================  ============================  ==========================================

Put into the reward (detached), k1 also follows the reverse KL, because the score-function estimator
multiplies it by grad log pi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from conf.settings import choices

# exp(20) = 4.9e8 is far larger than any useful ratio, and its square is finite in float32 and
# bfloat16.
MAX_LOG_RATIO = 20.0
KINDS = choices("algorithm.kl")


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), with log_ratio clamped to +-MAX_LOG_RATIO.

    The clamp keeps the loss finite if a single token has an extreme ratio.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    kind: str, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
) -> Tensor:
    """Return the estimate of KL(policy || ref) in nats for each token.

    It has the shape and dtype of ``logprobs`` and is differentiable in them. ``kind``: one of
    KINDS. ``old_logprobs``: log-probs under the policy that sampled the tokens; only ``k3_iw``
    needs them. Raises ValueError for an unknown kind or missing ``old_logprobs``.
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
    """Return the exact KL(policy || ref) in nats over the whole vocabulary.

    ``logits``, ``ref_logits``: [..., V]; the result is [...]. This is a diagnostic for a few
    tokens.
    """
    logp = torch.log_softmax(logits, dim=-1)
    logq = torch.log_softmax(ref_logits, dim=-1)
    # A token of probability 0 contributes 0. The product would be 0 * inf = NaN.
    return torch.where(logp.isneginf(), 0.0, logp.exp() * (logp - logq)).sum(-1)
