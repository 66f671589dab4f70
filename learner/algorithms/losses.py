"""Policy, preference and value losses: pure functions of padded [B, T] tensors, any float dtype.

One rule for all: ``loss = sum_i w_i * sum_t m_it * l_it``. The weights ``w`` are computed once, on the controller, for
the whole optimizer step (`sample_weights`), so the gradient does not depend on how rows are split into micro-batches or
over ranks.

Statistics are ``(sum, count, min, max)`` tuples of floats, to be merged and only then divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.kl import kl_estimate, safe_exp

Stats = dict[str, tuple[float, float, float, float]]
NORMALISERS = ("sequence_mean", "token_mean", "constant")


def sample_weights(
    normaliser: str,
    lengths: np.ndarray,
    valid: np.ndarray,
    constant: float | None = None,
    groups: np.ndarray | None = None,
    factors: np.ndarray | None = None,
) -> np.ndarray:
    """Weight of each token of each sample, float64 [N], for one whole optimizer step.

    ``lengths``: int [N], tokens that count (0 where a sample is masked); ``valid``: bool [N], samples trained on. A
    sample that is invalid or empty has weight 0 and enters no denominator: the step is normalised by what it trains on.

    - ``sequence_mean``: 1 / (n |o_i|), the mean over tokens, then over answers (DeepSeekMath eq. 3). With ``groups``
      (int [N]): over answers of a group, then over groups; the same unless group sizes differ.
    - ``token_mean``: 1 / sum_i |o_i| (DAPO eq. 8, over the step).
    - ``constant``: 1 / (n c), no length term (Dr. GRPO section 3.2).

    ``factors`` (float64 [N], alike within a group) turn these means into weighted ones: a sample of factor 0.1 counts
    a tenth in the sum and in the denominator.

    Raises ValueError for an unknown normaliser or a constant that is missing or not positive.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    used = np.asarray(valid, dtype=bool) & (lengths > 0)
    weights = np.zeros(len(lengths), dtype=np.float64)
    if normaliser not in NORMALISERS:
        raise ValueError(
            f"algorithm.normaliser={normaliser!r} is not known: expected one of {', '.join(NORMALISERS)}"
        )
    if normaliser == "constant" and not (constant is not None and constant > 0):
        raise ValueError(
            f"algorithm.loss_constant={constant} with normaliser=constant: expected a positive number of tokens"
        )
    if not used.any():
        return weights
    factor = (
        np.ones(int(used.sum())) if factors is None else np.asarray(factors, dtype=np.float64)[used]
    )
    if normaliser == "token_mean":
        weights[used] = factor / (factor * lengths[used]).sum()
        return weights
    if groups is not None:
        _, inverse, sizes = np.unique(
            np.asarray(groups)[used], return_inverse=True, return_counts=True
        )
        factor = factor / sizes[inverse]
    per_answer = factor / factor.sum()
    weights[used] = per_answer / (constant if normaliser == "constant" else lengths[used])
    return weights


# -- per-token losses: f(cfg, logprobs, old_logprobs, advantages, mask, stats) -> [B, T] ---------------------


def ppo_clip(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) (PPO eq. 7; DeepSeekMath eq. 3; DAPO decouples the two
    bounds).

    ``dual_clip`` c > 1 bounds the loss of tokens with A < 0 by -c A (Ye et al., 1912.09729)."""
    return _clipped(cfg, safe_exp(logprobs - old), adv, mask, stats)


def gspo(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """PPO clip on the sequence ratio s_i = (pi/pi_old)^(1/|o_i|) (GSPO eq. 7), given to each token of the answer.

    Each token carries s_i's value through its own log-prob (GSPO eq. 14): per-token advantages work too, and with one
    advantage per answer the gradient summed over the answer is that of s_i exactly."""
    log_ratio = logprobs - old
    mean = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return _clipped(cfg, safe_exp(mean.detach() + logprobs - logprobs.detach()), adv, mask, stats)


def cispo(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """-sg(clip(rho, 1 - eps_low, 1 + eps_high)) A log pi (MiniMax-M1, 2506.13585, eq. 4, 5): every token keeps
    a gradient."""
    ratio = safe_exp(logprobs - old).detach()
    low, high = 1.0 - cfg.eps_low, 1.0 + cfg.eps_high
    _ratio_stats(stats, ratio, ratio < low, ratio > high, mask)
    return -ratio.clamp(low, high) * adv * logprobs


def reinforce(
    cfg: Any, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, stats: Stats
) -> Tensor:
    """-A log pi (Williams 1992). With A = 1 it is SFT, with A = I(correct) RFT, with `advantages.dpo` DPO."""
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
    """Scalar loss of one micro-batch, and its statistics.

    ``logprobs`` [B, T] (requires grad), ``old_logprobs`` [B, T] (None: the policy itself, detached), ``advantages`` [B]
    or [B, T], ``weights`` [B] from `sample_weights`, ``mask`` [B, T] (1 = counts), ``ref_logprobs``, ``entropy``,
    ``behaviour_logprobs`` [B, T]. What lies under mask 0 or in rows of weight 0 may be anything and enters no
    statistic. Each row holds one whole answer.

    l = policy term * tis + beta * KL(kind) - entropy_coef * entropy, with tis = min(pi_old / pi_behaviour, tis_cap),
    detached (generator-learner mismatch; Yao et al. 2025). Raises ValueError when an input that cfg asks for is
    missing.
    """
    keep = _trained(mask, weights)
    mask = keep.to(logprobs.dtype)
    logprobs = _clean(logprobs, keep)
    old = logprobs.detach() if old_logprobs is None else _clean(old_logprobs, keep)
    adv = advantages.to(logprobs.dtype)
    adv = _clean(adv[:, None].expand_as(logprobs) if adv.dim() == 1 else adv, keep)
    stats: Stats = {}
    if cfg.loss not in LOSSES:
        raise ValueError(
            f"algorithm.loss={cfg.loss!r} is not known here: expected one of {', '.join(LOSSES)}"
        )
    per_token = LOSSES[cfg.loss](cfg, logprobs, old, adv, mask, stats)
    if cfg.tis_cap is not None:
        tis = truncated_importance(
            old,
            _clean(_need(behaviour_logprobs, "behaviour_logprobs", "tis_cap"), keep),
            cfg.tis_cap,
        )
        _put(stats, "tis_weight", tis, mask)
        per_token = per_token * tis
    _put(stats, "policy_loss", per_token, mask)
    if ref_logprobs is not None:
        ref = _clean(ref_logprobs, keep)
        _put(stats, "kl_ref", kl_estimate("k3", logprobs.detach(), ref), mask)
    if cfg.beta > 0 and cfg.kl_placement == "loss":
        _need(ref_logprobs, "ref_logprobs", "beta > 0 with kl_placement=loss")
        per_token = per_token + cfg.beta * kl_estimate(cfg.kl, logprobs, ref, old)
    if entropy is not None:
        entropy = _clean(entropy, keep)
        _put(stats, "entropy", entropy, mask)
    if cfg.entropy_coef:
        per_token = per_token - cfg.entropy_coef * _need(entropy, "entropy", "entropy_coef")
    _put(stats, "kl_old", kl_estimate("k3", logprobs.detach(), old), mask)
    loss = (weights.to(logprobs.dtype)[:, None] * mask * per_token).sum()
    return loss, stats


def truncated_importance(old_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_behaviour, cap), detached: corrects for a generator whose probabilities differ from the
    learner's."""
    return safe_exp(old_logprobs - behaviour_logprobs).clamp(max=cap).detach()


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta (chosen - ref_chosen) - beta (rejected - ref_rejected)), per pair (DPO, 2305.18290, eq. 7).

    Arguments [P]: log-probs of whole answers, summed over tokens (or averaged: DeepSeekMath appendix A.1.4). Returns
    the losses and the margins (the sigmoid's argument), both [P]. `advantages.dpo` gives the same gradient through the
    `reinforce` loss."""
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return -torch.nn.functional.logsigmoid(margin), margin


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    mask: Tensor,
    clip: float | None,
) -> tuple[Tensor, Stats]:
    """sum_i w_i sum_t m_it 1/2 max((V - R)^2, (clip(V, V_old +- clip) - R)^2); ``clip`` None: plain squares. Shapes as
    policy_loss.

    The statistics hold what explained variance needs: see `advantages.explained_variance` for whole batches."""
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
    """sum_m w_m BCE(sigmoid(s_m), y_m): a reward model's logits [M] against labels in [0, 1], one an answer or one a
    step (soft ones too: Math-Shepherd, 2312.08935, eq. 2). ``weights`` [M]: of the whole optimizer step."""
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits.dtype), reduction="none"
    )
    stats: Stats = {}
    _put(stats, "reward_loss", loss, (weights > 0).to(logits.dtype))
    return (weights.to(logits.dtype) * loss).sum(), stats


def pairwise_reward(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Stats]:
    """sum_p w_p -log sigmoid(s_chosen - s_rejected) (Bradley-Terry; Ouyang et al., 2203.02155, eq. 1). ``logits`` [2P]:
    pairs one after another, chosen first; ``weights`` [2P] alike; ``labels`` are not read."""
    chosen, rejected = logits.reshape(-1, 2).unbind(1)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected)
    w = weights.reshape(-1, 2)[:, 0].to(logits.dtype)
    stats: Stats = {}
    _put(stats, "reward_loss", loss, (w > 0).to(logits.dtype))
    return (w * loss).sum(), stats


REWARD_LOSSES = {"pointwise": pointwise_reward, "pairwise": pairwise_reward}


# -- helpers -------------------------------------------------------------------------------------------------


def _clipped(cfg: Any, ratio: Tensor, adv: Tensor, mask: Tensor, stats: Stats) -> Tensor:
    low, high = 1.0 - cfg.eps_low, 1.0 + cfg.eps_high
    loss = -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    # A bound acts only where the minimum takes the clipped branch: that is what the fractions count.
    _ratio_stats(stats, ratio, (ratio < low) & (adv < 0), (ratio > high) & (adv > 0), mask)
    if cfg.dual_clip is not None:
        bound = -cfg.dual_clip * adv
        _put(stats, "dual_clip_fraction", ((adv < 0) & (loss > bound)).to(mask.dtype), mask)
        loss = torch.where(adv < 0, torch.minimum(loss, bound), loss)
    return loss


def _ratio_stats(stats: Stats, ratio: Tensor, low: Tensor, high: Tensor, mask: Tensor) -> None:
    _put(stats, "ratio", ratio, mask)
    _put(stats, "clip_fraction_low", low.to(mask.dtype), mask)
    _put(stats, "clip_fraction_high", high.to(mask.dtype), mask)


def _put(stats: Stats, name: str, value: Tensor, mask: Tensor) -> None:
    """Record (sum, count, min, max) of the values under the mask; nothing at all when the mask is empty."""
    picked = value.detach()[mask.bool()].double()
    if picked.numel():
        total, low, high = torch.stack([picked.sum(), picked.min(), picked.max()]).tolist()
        stats[name] = (total, float(picked.numel()), low, high)


def _trained(mask: Tensor, weights: Tensor) -> Tensor:
    """bool [B, T]: tokens that count, of rows that count: a row of weight 0 cannot spoil the sum either."""
    return mask.bool() & (weights > 0)[:, None]


def _clean(value: Tensor, keep: Tensor) -> Tensor:
    """Zero what is masked before any arithmetic: 0 * inf is nan, and its gradient would be too."""
    return value.masked_fill(~keep, 0.0)


def _need(value: Tensor | None, name: str, setting: str) -> Tensor:
    if value is None:
        raise ValueError(f"algorithm.{setting} needs {name}, and none were given to the loss")
    return value
