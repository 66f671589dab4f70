"""Advantages: pure float64 functions of rewards and group ids.

Sample-level functions take ``rewards`` float64 [N], ``groups`` int [N] (any ids, unequal sizes) and ``valid`` bool [N]
(reward status ok), and return float64 [N], 0 for invalid samples. An invalid reward (nan, say) never enters a baseline.
Token-level functions take and return ragged lists: one float64 array [T_i] per sample.

A group whose rewards are equal up to rounding gives exactly 0, and so does a group of one valid sample: it has no
baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Ragged = list[np.ndarray]
RELATIVE_FLOOR = (
    1e-6  # spread below this share of the largest |reward| is rounding (float32 sums err by 1e-7)
)


# -- group statistics ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupStats:
    """Per group, over its valid samples, in order of group id; ``index`` int [N] maps each sample to its group."""

    ids: np.ndarray
    index: np.ndarray
    count: np.ndarray  # valid samples
    mean: np.ndarray  # 0 where count is 0
    std: np.ndarray  # population; exactly 0 where the rewards are equal up to rounding
    alive: np.ndarray  # bool: std > 0, for which it takes two valid samples


def group_stats(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> GroupStats:
    """Count, mean and population std of each group's valid rewards.

    Raises ValueError when a valid reward is not finite or lengths differ."""
    rewards, groups, valid = _checked(rewards, groups, valid)
    ids, index = np.unique(groups, return_inverse=True)
    size = len(ids)
    kept = np.where(valid, rewards, 0.0)
    count = np.bincount(index, valid.astype(np.float64), size)
    mean = np.bincount(index, kept, size) / np.maximum(count, 1)
    deviation = np.where(valid, rewards - mean[index], 0.0) if size else kept
    std = np.sqrt(np.bincount(index, deviation**2, size) / np.maximum(count, 1))
    scale = np.zeros(size)
    np.maximum.at(scale, index, np.abs(kept))
    std[std <= RELATIVE_FLOOR * scale] = 0.0
    return GroupStats(ids, index, count.astype(np.int64), mean, std, std > 0)


# -- sample-level advantages ---------------------------------------------------------------------------------


def grpo(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray, std_normalise: bool = True
) -> np.ndarray:
    """(r - mean) / std of its group (DeepSeekMath 4.1.2), std over the population; without std: Dr. GRPO's r - mean."""
    stats = group_stats(rewards, groups, valid)
    centred = _centred(rewards, valid, stats)
    if not std_normalise:
        return centred
    return centred / np.where(stats.alive, stats.std, 1.0)[stats.index]


def dr_grpo(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """r - mean of its group (2503.20783, section 3.2)."""
    return grpo(rewards, groups, valid, std_normalise=False)


def rloo(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """r - mean of the others of its group = G/(G-1) (r - mean) (Ahmadian et al., 2402.14740)."""
    stats = group_stats(rewards, groups, valid)
    factor = stats.count / np.maximum(stats.count - 1, 1)
    return _centred(rewards, valid, stats) * factor[stats.index]


def reinforce_pp_baseline(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """r - mean of its group, then divided by the std over the whole batch (REINFORCE++-baseline, 2501.03262).

    The batch mean is 0 by construction; groups of one are no part of the batch std."""
    stats = group_stats(rewards, groups, valid)
    centred = _centred(rewards, valid, stats)
    used = np.asarray(valid, dtype=bool) & (stats.count >= 2)[stats.index]
    std = np.sqrt(np.mean(centred[used] ** 2)) if used.any() else 0.0
    return centred / std if std > 0 else centred


def constant(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """1 for each valid sample: SFT's gradient coefficient."""
    return np.asarray(valid, dtype=bool).astype(np.float64)


def correct(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """I(correct), of rewards that are accuracies in [0, 1] (RFT and Online RFT; DeepSeekMath appendix A.1)."""
    _checked(rewards, groups, valid)
    return (np.asarray(valid, dtype=bool) & (np.nan_to_num(rewards) >= 1.0)).astype(np.float64)


def reward(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The reward itself: REINFORCE without a baseline."""
    _checked(rewards, groups, valid)
    return np.where(valid, rewards, 0.0)


SAMPLE_LEVEL: dict[str, Callable[..., np.ndarray]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "constant": constant,
    "correct": correct,
    "reward": reward,
}


# -- token-level advantages ----------------------------------------------------------------------------------


def process(
    step_rewards: Sequence[np.ndarray],
    step_ends: Sequence[np.ndarray],
    lengths: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray,
) -> Ragged:
    """Process supervision (DeepSeekMath 4.1.3): the step rewards of all answers of a group are normalised together, and
    a token's advantage is the sum of its answer's normalised rewards of the steps that end at or after it.

    ``step_rewards``: per sample float [S_i]; ``step_ends``: per sample int [S_i], index of the last token of each step;
    ``lengths`` int [N]. Tokens after the last step get 0. Raises ValueError when rewards and ends do not match or an
    end lies outside."""
    valid, counts = (
        np.asarray(valid, dtype=bool),
        np.array([len(r) for r in step_rewards], dtype=np.int64),
    )
    for i, ends in enumerate(step_ends):
        ends = np.asarray(ends, dtype=np.int64)
        if len(ends) != counts[i] or (
            len(ends) and not (ends.min() >= 0 and ends.max() < lengths[i])
        ):
            raise ValueError(
                f"sample {i}: {counts[i]} step rewards with ends {ends.tolist()}: expected one token index in "
                f"[0, {lengths[i]}) for each"
            )
    flat = np.concatenate([np.zeros(0), *(np.asarray(r, dtype=np.float64) for r in step_rewards)])
    owner = np.repeat(np.arange(len(counts)), counts)
    groups = np.asarray(groups)
    stats = group_stats(flat, groups[owner], valid[owner])
    normal = (
        _centred(flat, valid[owner], stats) / np.where(stats.alive, stats.std, 1.0)[stats.index]
    )
    _, index = np.unique(groups, return_inverse=True)
    several = np.bincount(index, valid & (counts > 0))[index] >= 2 if len(index) else valid
    out: Ragged = []
    for i, steps in enumerate(np.split(normal, np.cumsum(counts)[:-1]) if len(counts) else []):
        at_end = np.zeros(int(lengths[i]))
        np.add.at(at_end, np.asarray(step_ends[i], dtype=np.int64), steps * several[i])
        out.append(_to_go(at_end))
    return out


def token_rewards(
    rewards: np.ndarray,
    lengths: np.ndarray,
    valid: np.ndarray,
    kl: Sequence[np.ndarray] | None = None,
    beta: float = 0.0,
) -> Ragged:
    """-beta * kl_t at each token, plus the outcome reward at the last (InstructGPT's reward; ``kl`` is k1, per
    token)."""
    out: Ragged = []
    for i, length in enumerate(np.asarray(lengths, dtype=np.int64)):
        tokens = (
            np.zeros(length)
            if kl is None or not valid[i]
            else -beta * np.asarray(kl[i], dtype=np.float64)
        )
        if tokens.shape != (length,):
            raise ValueError(f"sample {i} has {length} tokens but {tokens.shape} KL values")
        if length and valid[i]:
            tokens[-1] += rewards[i]
        out.append(tokens)
    return out


def gae(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: np.ndarray | None = None,
    value_lam: float | None = None,
) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimation (1506.02438, eq. 16): delta_t = r_t + gamma V_{t+1} - V_t; A_t = sum_l (gamma
    lam)^l delta_{t+l}.

    ``rewards`` and ``values`` [T_i] per sample; ``bootstrap`` float [N], the value after the last token (0 where the
    answer ended by itself, the default). Returns advantages and value targets A + V, where ``value_lam`` may give the
    targets a lambda of their own. lam = 1: Monte Carlo return minus value; lam = 0: the one-step TD error. Vectorised
    over samples, T_max steps."""
    lengths = np.array([len(r) for r in rewards], dtype=np.int64)
    if any(len(v) != n for v, n in zip(values, lengths, strict=True)):
        raise ValueError(
            f"GAE needs a value a token: rewards have {lengths.tolist()}, values {[len(v) for v in values]}"
        )
    reward, value = _pad(rewards, lengths), _pad(values, lengths)
    rows = np.arange(len(lengths))
    following = np.concatenate([value[:, 1:], np.zeros((len(rows), 1))], axis=1)[
        :, : value.shape[1]
    ]
    if bootstrap is not None and value.shape[1]:
        some = lengths > 0
        following[rows[some], lengths[some] - 1] = np.asarray(bootstrap, dtype=np.float64)[some]
    inside = np.arange(value.shape[1])[None, :] < lengths[:, None]
    delta = np.where(inside, reward + gamma * following - value, 0.0)
    advantage = _discounted(delta, gamma * lam)
    target = value + (advantage if value_lam is None else _discounted(delta, gamma * value_lam))
    return _unpad(advantage, lengths), _unpad(target, lengths)


def dpo(log_ratios: np.ndarray, chosen: np.ndarray, groups: np.ndarray, beta: float) -> np.ndarray:
    """DPO's gradient coefficient: +beta sigma(-margin) for the chosen, -beta sigma(-margin) for the rejected answer of
    a pair.

    margin = beta (log_ratio of the chosen - of the rejected); ``log_ratios`` float [N]: log pi(o) - log pi_ref(o),
    summed over tokens (or averaged, DeepSeekMath appendix A.1.4, whose coefficient leaves out beta); ``chosen`` bool
    [N]; ``groups`` [N] names the pair. With the `reinforce` loss this gives the gradient of the DPO loss. Raises
    ValueError unless each group is one pair."""
    ids, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    chosen = np.asarray(chosen, dtype=bool)
    wins = np.bincount(index, chosen, len(ids))
    if not ((counts == 2) & (wins == 1)).all():
        bad = int(np.flatnonzero((counts != 2) | (wins != 1))[0])
        raise ValueError(
            f"pair {ids[bad]} has {counts[bad]} answers, {int(wins[bad])} of them chosen: expected one and one rejected"
        )
    sign = np.where(chosen, 1.0, -1.0)
    margin = beta * np.bincount(index, sign * np.asarray(log_ratios, dtype=np.float64), len(ids))
    return (sign * beta * np.exp(-np.logaddexp(0.0, margin))[index]).astype(np.float64)


def overlong_penalty(lengths: np.ndarray, max_tokens: int, cache: int) -> np.ndarray:
    """DAPO's soft overlong punishment (2503.14476, eq. 13), float64 [N] to be added to the rewards: 0 up to max_tokens
    - cache tokens, then linear down to -1 at max_tokens. Raises ValueError unless 0 < cache <= max_tokens."""
    if not 0 < cache <= max_tokens:
        raise ValueError(
            f"overlong cache={cache} tokens: expected in (0, rollout.max_tokens={max_tokens}]"
        )
    return np.clip((max_tokens - cache - np.asarray(lengths, dtype=np.float64)) / cache, -1.0, 0.0)


# -- normalisation over the whole batch ----------------------------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers; those of parts held by different ranks merge
    exactly."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Moments:
        flat = np.concatenate([np.zeros(0), *arrays])
        return (
            cls(float(len(flat)), float(flat.mean()), float(((flat - flat.mean()) ** 2).sum()))
            if len(flat)
            else cls()
        )

    def merge(self, other: Moments) -> Moments:
        """Chan et al. (1983): numerically safe, order does not matter beyond rounding."""
        count = self.count + other.count
        if count == 0:
            return self
        gap = other.mean - self.mean
        return Moments(
            count,
            self.mean + gap * other.count / count,
            self.m2 + other.m2 + gap**2 * self.count * other.count / count,
        )

    @property
    def std(self) -> float:
        """Population std; exactly 0 where it is rounding."""
        std = float(np.sqrt(self.m2 / self.count)) if self.count else 0.0
        return std if std > RELATIVE_FLOOR * abs(self.mean) else 0.0


def whiten(
    tokens: Sequence[np.ndarray], valid: np.ndarray, moments: Moments | None = None
) -> Ragged:
    """(A - mean) / std over all tokens of valid samples; all equal gives 0; invalid samples give 0.

    ``moments``: of the whole optimizer step where ``tokens`` are only a part of it."""
    if moments is None:
        moments = Moments.of([t for t, ok in zip(tokens, valid, strict=True) if ok])
    scale = 1.0 / moments.std if moments.std > 0 else 0.0
    return [
        (t - moments.mean) * scale if ok else np.zeros_like(t)
        for t, ok in zip(tokens, valid, strict=True)
    ]


def explained_variance(returns: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> float:
    """1 - Var(R - V) / Var(R) over all tokens: 1 is a perfect critic, 0 no better than a constant; nan where R does not
    vary."""
    spread = Moments.of(returns).m2
    error = Moments.of(
        [np.asarray(r) - np.asarray(v) for r, v in zip(returns, values, strict=True)]
    ).m2
    return 1.0 - error / spread if spread > 0 else float("nan")


# -- one entry for all ---------------------------------------------------------------------------------------

TOKEN_LEVEL = ("process", "reinforce_pp", "gae")
NAMES = (*SAMPLE_LEVEL, *TOKEN_LEVEL, "dpo")


def compute(
    cfg: Any,
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray,
    *,
    lengths: np.ndarray | None = None,
    kl: Sequence[np.ndarray] | np.ndarray | None = None,
    step_rewards: Sequence[np.ndarray] | None = None,
    step_ends: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
    bootstrap: np.ndarray | None = None,
    log_ratios: np.ndarray | None = None,
) -> np.ndarray | Ragged:
    """Advantages by ``cfg.advantage``: float64 [N], or a ragged list for the token-level ones (`TOKEN_LEVEL`).

    With kl_placement=reward and beta > 0, ``kl`` holds k1 per token (ragged); for sample-level ones sums [N] do too.
    For `dpo` the chosen answer of a pair is the one with reward > 0. Raises ValueError naming the setting when an input
    it needs is missing."""
    name, in_reward = cfg.advantage, cfg.kl_placement == "reward" and cfg.beta > 0
    if name not in NAMES:
        raise ValueError(
            f"algorithm.advantage={name!r} is not known: expected one of {', '.join(NAMES)}"
        )
    needs = {
        "kl": in_reward and kl is None and name != "dpo",
        "lengths": name in TOKEN_LEVEL and lengths is None,
        "values": name == "gae" and values is None,
        "step_rewards and step_ends": name == "process"
        and (step_rewards is None or step_ends is None),
        "log_ratios": name == "dpo" and log_ratios is None,
    }
    for missing in (key for key, absent in needs.items() if absent):
        raise ValueError(
            f"algorithm.advantage={name} (kl_placement={cfg.kl_placement}, beta={cfg.beta}) needs {missing}"
        )
    valid = np.asarray(valid, dtype=bool)
    if name == "dpo":
        return dpo(log_ratios, np.asarray(rewards) > 0, groups, cfg.beta)
    if name == "process":
        return process(step_rewards, step_ends, lengths, groups, valid)
    if name in TOKEN_LEVEL:
        _checked(rewards, groups, valid)
        per_token = token_rewards(rewards, lengths, valid, kl if in_reward else None, cfg.beta)
        if name == "gae":
            tokens, _ = gae(per_token, values, cfg.gamma, cfg.lam, bootstrap)
            return (
                whiten(tokens, valid)
                if cfg.std_normalise
                else [t * ok for t, ok in zip(tokens, valid, strict=True)]
            )
        return whiten([_to_go(t, cfg.gamma) for t in per_token], valid)
    if in_reward:
        rewards = np.asarray(rewards) - cfg.beta * np.array([np.sum(k) for k in kl])
    if name == "grpo":
        return grpo(rewards, groups, valid, cfg.std_normalise)
    return SAMPLE_LEVEL[name](rewards, groups, valid)


# -- helpers -------------------------------------------------------------------------------------------------


def _centred(rewards: np.ndarray, valid: np.ndarray, stats: GroupStats) -> np.ndarray:
    """r - group mean; exactly 0 for invalid samples and for groups without spread."""
    use = np.asarray(valid, dtype=bool) & stats.alive[stats.index]
    return np.where(use, np.asarray(rewards, dtype=np.float64) - stats.mean[stats.index], 0.0)


def _checked(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rewards, groups = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    valid = np.asarray(valid, dtype=bool)
    if not rewards.shape == groups.shape == valid.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {rewards.shape}, groups {groups.shape}, valid {valid.shape}: expected three of one shape [N]"
        )
    if not np.isfinite(rewards[valid]).all():
        bad = int(np.flatnonzero(valid & ~np.isfinite(rewards))[0])
        raise ValueError(
            f"reward {rewards[bad]} of sample {bad} has status ok: a reward that is not finite must not"
        )
    return rewards, groups, valid


def _to_go(tokens: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """sum_{l >= 0} gamma^l tokens_{t+l}."""
    return np.cumsum(tokens[::-1])[::-1] if gamma == 1.0 else _discounted(tokens[None, :], gamma)[0]


def _discounted(rows: np.ndarray, factor: float) -> np.ndarray:
    out, running = np.zeros_like(rows), np.zeros(len(rows))
    for t in range(rows.shape[1] - 1, -1, -1):
        running = rows[:, t] + factor * running
        out[:, t] = running
    return out


def _pad(ragged: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    out = np.zeros((len(lengths), int(lengths.max(initial=0))))
    for row, values in zip(out, ragged, strict=True):
        row[: len(values)] = values
    return out


def _unpad(rows: np.ndarray, lengths: np.ndarray) -> Ragged:
    return [row[:n].copy() for row, n in zip(rows, lengths, strict=True)]
