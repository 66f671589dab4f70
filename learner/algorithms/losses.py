"""Policy, value and reward-model losses: pure functions of tensors of any float dtype.

Every policy and value loss of padded [B, T] tensors has the form

    loss = sum_i weight_i * sum_t mask_it * l_it

with i an answer and t a token. The weights are computed once for the whole optimizer step, by
`sample_weights` on the controller. The gradient therefore does not depend on how the answers are
split into micro-batches or over ranks (DESIGN invariant 2).

Each loss also returns statistics: a Stat (sum, count, min, max) by name, over the tokens that
count. They are merged over micro-batches and ranks before a mean is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.monitoring.stat import Stat
from conf.settings import choices
from learner.algorithms.kl import kl_estimate, safe_exp

Stats = dict[str, Stat]
NORMALISERS = choices("algorithm.normaliser")


def sample_weights(
    normaliser: str,
    lengths: np.ndarray,
    valid: np.ndarray,
    constant: float | None = None,
    factors: np.ndarray | None = None,
) -> np.ndarray:
    """Return the weight of each token of each answer, float64 [N], for one whole optimizer step.

    lengths: int [N], the number of tokens that count, 0 for a masked answer.
    valid: bool [N], whether the answer is trained on. An answer that is not valid, or empty, gets
    weight 0 and enters no denominator.

    - ``sequence_mean``: 1 / (n |o_i|), the mean over tokens, then over answers (DeepSeekMath,
      2402.03300, eq. 3).
    - ``token_mean``: 1 / sum_i |o_i| (DAPO, 2503.14476, eq. 8, over the step).
    - ``constant``: 1 / (n c), without a length term (Dr. GRPO, 2503.20783, section 3.2). c is
      `constant`, in tokens.

    factors: float64 [N], equal within a group, turn these means into weighted means: an answer of
    factor 0.1 counts a tenth in the sum and in the denominator. None: all are 1.

    Raises ValueError for an unknown normaliser, or for a constant that is missing or not positive.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    used = np.asarray(valid, dtype=bool) & (lengths > 0)
    weights = np.zeros(len(lengths), dtype=np.float64)
    if normaliser not in NORMALISERS:
        raise ValueError(
            f"algorithm.normaliser={normaliser!r} is not known: "
            f"expected one of {', '.join(NORMALISERS)}"
        )
    if normaliser == "constant" and not (constant is not None and constant > 0):
        raise ValueError(
            f"algorithm.loss_constant={constant} with normaliser=constant: "
            "expected a positive number of tokens"
        )
    if not used.any():
        return weights
    factor = (
        np.ones(int(used.sum())) if factors is None else np.asarray(factors, dtype=np.float64)[used]
    )
    if normaliser == "token_mean":
        weights[used] = factor / (factor * lengths[used]).sum()
        return weights
    per_answer = factor / factor.sum()
    weights[used] = per_answer / (constant if normaliser == "constant" else lengths[used])
    return weights


# ---- per-token losses ----------------------------------------------------------------------------
#
# f(cfg, logprobs, old, adv, mask, stats) -> [B, T], with cfg an AlgorithmConfig, all tensors [B,
# T], old the log-probs of the policy that scored the batch, and adv the advantages. Each adds to
# `stats`.


def ppo_clip(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """Return -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), with rho = pi / pi_old.

    PPO (1707.06347) eq. 7; DeepSeekMath (2402.03300) eq. 3. Separate bounds are DAPO's
    (2503.14476). ``dual_clip`` c > 1 bounds the loss of tokens with A < 0 by -c A (Ye et al.,
    1912.09729).
    """
    return _clipped(cfg, safe_exp(logprobs - old), adv, mask, stats)


def gspo(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """Return the PPO clip on the sequence ratio s_i = (pi / pi_old)^(1/|o_i|), for each token.

    GSPO (2507.18071) eq. 7. Each token carries the value of s_i with the gradient of its own
    log-prob (eq. 14). Advantages may therefore differ by token. With one advantage per answer, the
    gradient summed over the answer is exactly that of s_i.
    """
    log_ratio = logprobs - old
    mean = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return _clipped(cfg, safe_exp(mean.detach() + logprobs - logprobs.detach()), adv, mask, stats)


def cispo(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """Return -sg(clip(rho, 1 - eps_low, 1 + eps_high)) A log pi; sg stops the gradient.

    MiniMax-M1 (2506.13585) eq. 4 and 5. Every token keeps a gradient, clipped or not.
    """
    ratio = safe_exp(logprobs - old).detach()
    low, high = 1.0 - cfg.eps_low, 1.0 + cfg.eps_high
    _put_ratio(stats, ratio, ratio < low, ratio > high, mask)
    return -ratio.clamp(low, high) * adv * logprobs


def reinforce(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """Return -A log pi (Williams 1992).

    With A = 1 this is SFT, with A = 1 for correct answers and 0 for others RFT, and with
    `advantages.dpo` DPO.
    """
    return -adv * logprobs


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sft": reinforce,
}


def policy_loss(
    cfg: Any,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return the scalar loss of one micro-batch, and its statistics.

    l = policy term * tis + beta * KL(kind) - entropy_coef * entropy, where
    tis = min(pi_old / pi_behaviour, tis_cap) carries no gradient. It corrects for a generator whose
    probabilities differ from the learner's (truncated importance sampling, Yao et al. 2025).

    cfg: AlgorithmConfig.
    logprobs: [B, T], requires grad.
    old_logprobs: [B, T]; None stands for the policy itself, detached.
    advantages: [B] or [B, T].
    weights: [B] from `sample_weights`. mask: [B, T], 1 for tokens that count.
    ref_logprobs, entropy, behaviour_logprobs: [B, T].

    Each row holds one whole answer. Values under mask 0 and in rows of weight 0 may be anything,
    even NaN; they enter neither the loss nor a statistic.

    Raises ValueError for an unknown cfg.loss, or if an input that cfg needs is missing.
    """
    if cfg.loss not in LOSSES:
        expected = f"expected one of {', '.join(LOSSES)}"
        raise ValueError(f"algorithm.loss={cfg.loss!r} is not known here: {expected}")
    keep = _trained(mask, weights)
    mask = keep.to(logprobs.dtype)
    logprobs = _clean(logprobs, keep)
    old = logprobs.detach() if old_logprobs is None else _clean(old_logprobs, keep)
    adv = advantages.to(logprobs.dtype)
    adv = _clean(adv[:, None].expand_as(logprobs) if adv.dim() == 1 else adv, keep)
    stats: Stats = {}
    per_token = LOSSES[cfg.loss](cfg, logprobs, old, adv, mask, stats)
    if cfg.tis_cap is not None:
        behaviour = _required(behaviour_logprobs, "behaviour_logprobs", "tis_cap")
        tis = truncated_importance(old, _clean(behaviour, keep), cfg.tis_cap)
        _put(stats, "tis_weight", tis, mask)
        per_token = per_token * tis
    _put(stats, "policy_loss", per_token, mask)
    if ref_logprobs is not None:
        ref = _clean(ref_logprobs, keep)
        _put(stats, "kl_ref", kl_estimate("k3", logprobs.detach(), ref), mask)
    if cfg.beta > 0 and cfg.kl_placement == "loss":
        _required(ref_logprobs, "ref_logprobs", "beta > 0 with kl_placement=loss")
        per_token = per_token + cfg.beta * kl_estimate(cfg.kl, logprobs, ref, old)
    if entropy is not None:
        entropy = _clean(entropy, keep)
        _put(stats, "entropy", entropy, mask)
    if cfg.entropy_coef:
        per_token = per_token - cfg.entropy_coef * _required(entropy, "entropy", "entropy_coef")
    _put(stats, "kl_old", kl_estimate("k3", logprobs.detach(), old), mask)
    loss = (weights.to(logprobs.dtype)[:, None] * mask * per_token).sum()
    return loss, stats


def truncated_importance(old_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """Return min(pi_old / pi_behaviour, cap), same shape, without a gradient."""
    return safe_exp(old_logprobs - behaviour_logprobs).clamp(max=cap).detach()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    mask: Tensor,
    clip: float | None,
) -> tuple[Tensor, Stats]:
    """Return the critic's scalar loss of one micro-batch, and its statistics.

    sum_i w_i sum_t m_it 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), or plain
    squares if `clip` is None. values, old_values and returns are [B, T]; weights [B] and mask [B,
    T] as in `policy_loss`.
    """
    keep = _trained(mask, weights)
    mask = keep.to(values.dtype)
    values, old_values, returns = (
        _clean(values, keep),
        _clean(old_values, keep),
        _clean(returns, keep),
    )
    square = (values - returns).square()
    stats: Stats = {}
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        clipped = (near - returns).square()
        _put(stats, "value_clip_fraction", (clipped > square).to(values.dtype), mask)
        square = torch.maximum(square, clipped)
    _put(stats, "value_loss", 0.5 * square, mask)
    _put(stats, "value", values, mask)
    return 0.5 * (weights.to(values.dtype)[:, None] * mask * square).sum(), stats


def pointwise_reward(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_m w_m BCE(sigmoid(s_m), y_m), a reward model's loss, and its statistics.

    logits: [M], one for each answer or for each step.
    labels: [M] in [0, 1], which may be soft (Math-Shepherd, 2312.08935, eq. 2).
    weights: [M], for the whole optimizer step.
    """
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits.dtype), reduction="none"
    )
    stats: Stats = {}
    _put(stats, "reward_loss", loss, (weights > 0).to(logits.dtype))
    return (weights.to(logits.dtype) * loss).sum(), stats


def pairwise_reward(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """Return sum_p w_p -log sigmoid(s_chosen - s_rejected), and its statistics.

    Bradley-Terry (Ouyang et al., 2203.02155, eq. 1). logits: [2P], pairs one after another, the
    chosen answer first. weights: [2P], equal within a pair. labels: [2P], not used.
    """
    chosen, rejected = logits.reshape(-1, 2).unbind(1)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected)
    w = weights.reshape(-1, 2)[:, 0].to(logits.dtype)
    stats: Stats = {}
    _put(stats, "reward_loss", loss, (w > 0).to(logits.dtype))
    return (w * loss).sum(), stats


REWARD_LOSSES = {"pointwise": pointwise_reward, "pairwise": pairwise_reward}


# ---- helpers -------------------------------------------------------------------------------------


def _clipped(cfg: Any, ratio: Tensor, adv: Tensor, mask: Tensor, stats: Stats) -> Tensor:
    """Return the clipped loss [B, T] of a ratio, with the dual clip if cfg asks for it."""
    low, high = 1.0 - cfg.eps_low, 1.0 + cfg.eps_high
    loss = -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    # A bound acts only where the minimum takes the clipped branch. The fractions count these
    # tokens.
    _put_ratio(stats, ratio, (ratio < low) & (adv < 0), (ratio > high) & (adv > 0), mask)
    if cfg.dual_clip is not None:
        bound = -cfg.dual_clip * adv
        _put(stats, "dual_clip_fraction", ((adv < 0) & (loss > bound)).to(mask.dtype), mask)
        loss = torch.where(adv < 0, torch.minimum(loss, bound), loss)
    return loss


def _put_ratio(stats: Stats, ratio: Tensor, low: Tensor, high: Tensor, mask: Tensor) -> None:
    """Record the ratio and the fractions of tokens clipped at the lower and the upper bound."""
    _put(stats, "ratio", ratio, mask)
    _put(stats, "clip_fraction_low", low.to(mask.dtype), mask)
    _put(stats, "clip_fraction_high", high.to(mask.dtype), mask)


def _put(stats: Stats, name: str, value: Tensor, mask: Tensor) -> None:
    """Record the Stat of the values under the mask, or nothing if the mask is empty."""
    picked = value.detach()[mask.bool()].double()
    if picked.numel():
        total, low, high = torch.stack([picked.sum(), picked.min(), picked.max()]).tolist()
        stats[name] = Stat(total, float(picked.numel()), low, high)


def _trained(mask: Tensor, weights: Tensor) -> Tensor:
    """Return which tokens enter the loss, bool [B, T]: under the mask, in a row of weight > 0.

    Rows of weight 0 are left out rather than multiplied by 0, because 0 * inf is NaN.
    """
    return mask.bool() & (weights > 0)[:, None]


def _clean(value: Tensor, keep: Tensor) -> Tensor:
    """Set masked values to 0 before any arithmetic: 0 * inf is NaN, and so is its gradient."""
    return value.masked_fill(~keep, 0.0)


def _required(value: Tensor | None, name: str, setting: str) -> Tensor:
    """Return `value`, or raise ValueError if it is None."""
    if value is None:
        raise ValueError(f"algorithm.{setting} needs {name}, and none were given to the loss")
    return value
