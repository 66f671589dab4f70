"""Advantages with one value per token: pure float64 functions on ragged lists.

A ragged list holds one float64 array [T_i] per sample. Invalid samples get 0 at every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from learner.algorithms.advantages.group_statistics import (
    RELATIVE_FLOOR,
    centred,
    checked,
    divided_by_std,
    group_stats,
)

Ragged = list[np.ndarray]


@dataclass(frozen=True)
class TokenInputs:
    """What a token-level advantage may be computed from, for N samples of T_i tokens."""

    rewards: np.ndarray  # float64 [N]
    groups: np.ndarray  # int [N]
    valid: np.ndarray  # bool [N]: the status of the reward is ok
    lengths: np.ndarray | None = None  # int [N], in tokens
    kl: Sequence[np.ndarray] | None = None  # k1 per token, [T_i]; only where it is in the reward
    step_rewards: Sequence[np.ndarray] | None = None  # float [S_i]
    step_ends: Sequence[np.ndarray] | None = None  # int [S_i], index of each step's last token
    values: Sequence[np.ndarray] | None = None  # of the critic, [T_i]


@dataclass(frozen=True)
class TokenLevel:
    """A registered function of (AlgorithmConfig, TokenInputs), and the inputs that it needs."""

    function: Callable[[Any, TokenInputs], Ragged]
    needs: tuple[str, ...]


TOKEN_LEVEL: dict[str, TokenLevel] = {}


def token_level(
    name: str, *needs: str
) -> Callable[[Callable[[Any, TokenInputs], Ragged]], Callable[[Any, TokenInputs], Ragged]]:
    """Register a function as `algorithm.advantage`=name; ``needs``: fields of TokenInputs."""

    def register(function: Callable[[Any, TokenInputs], Ragged]) -> Callable[..., Ragged]:
        TOKEN_LEVEL[name] = TokenLevel(function, ("lengths", *needs))
        return function

    return register


# -- the registered advantages ---------------------------------------------------------------------


@token_level("process", "step_rewards", "step_ends")
def process_supervision(cfg: Any, inputs: TokenInputs) -> Ragged:
    """Process supervision: `process` on the step rewards of the inputs."""
    return process(
        inputs.step_rewards, inputs.step_ends, inputs.lengths, inputs.groups, inputs.valid
    )


@token_level("reinforce_pp")
def reinforce_pp(cfg: Any, inputs: TokenInputs) -> Ragged:
    """Rewards-to-go, normalised over all tokens of the batch (REINFORCE++, 2501.03262)."""
    rewards = _token_rewards(cfg, inputs)
    return whiten([_to_go(r, cfg.gamma) for r in rewards], inputs.valid)


@token_level("gae", "values")
def gae_of_outcome(cfg: Any, inputs: TokenInputs) -> Ragged:
    """`gae` of the outcome reward, normalised over the batch where cfg.std_normalise is set."""
    advantages, _ = gae(_token_rewards(cfg, inputs), inputs.values, cfg.gamma, cfg.lam)
    if cfg.std_normalise:
        return whiten(advantages, inputs.valid)
    return [a * ok for a, ok in zip(advantages, inputs.valid, strict=True)]


def _token_rewards(cfg: Any, inputs: TokenInputs) -> Ragged:
    checked(inputs.rewards, inputs.groups, inputs.valid)
    return token_rewards(inputs.rewards, inputs.lengths, inputs.valid, inputs.kl, cfg.beta)


# -- the mathematics -------------------------------------------------------------------------------


def process(
    step_rewards: Sequence[np.ndarray],
    step_ends: Sequence[np.ndarray],
    lengths: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray,
) -> Ragged:
    """Process supervision (DeepSeekMath, 2402.03300, section 4.1.3).

    The step rewards of all answers of a group are normalised together. The advantage of a token is
    the sum of the normalised rewards of those steps of its answer that end at it or after it;
    tokens after the last step get 0.

    ``step_rewards``: float [S_i] per sample; ``step_ends``: int [S_i] per sample, the index of the
    last token of each step; ``lengths`` int [N]. Raises ValueError when rewards and ends do not
    match or an end lies outside the answer."""
    valid = np.asarray(valid, dtype=bool)
    counts = np.array([len(r) for r in step_rewards], dtype=np.int64)
    _check_step_ends(step_ends, counts, lengths)
    flat = np.concatenate([np.zeros(0), *(np.asarray(r, dtype=np.float64) for r in step_rewards)])
    sample = np.repeat(np.arange(len(counts)), counts)  # of each step
    groups = np.asarray(groups)
    stats = group_stats(flat, groups[sample], valid[sample])
    normalised = divided_by_std(centred(flat, valid[sample], stats), stats)
    # A group in which fewer than two answers have steps has no baseline.
    _, index = np.unique(groups, return_inverse=True)
    has_baseline = np.bincount(index, valid & (counts > 0))[index] >= 2 if len(index) else valid
    out: Ragged = []
    for i, steps in enumerate(np.split(normalised, np.cumsum(counts)[:-1]) if len(counts) else []):
        at_end = np.zeros(int(lengths[i]))
        np.add.at(at_end, np.asarray(step_ends[i], dtype=np.int64), steps * has_baseline[i])
        out.append(_to_go(at_end))
    return out


def _check_step_ends(
    step_ends: Sequence[np.ndarray], counts: np.ndarray, lengths: np.ndarray
) -> None:
    for i, ends in enumerate(step_ends):
        ends = np.asarray(ends, dtype=np.int64)
        inside = not len(ends) or (ends.min() >= 0 and ends.max() < lengths[i])
        if len(ends) != counts[i] or not inside:
            raise ValueError(
                f"sample {i}: {counts[i]} step rewards with ends {ends.tolist()}: expected one "
                f"token index in [0, {lengths[i]}) for each"
            )


def token_rewards(
    rewards: np.ndarray,
    lengths: np.ndarray,
    valid: np.ndarray,
    kl: Sequence[np.ndarray] | None = None,
    beta: float = 0.0,
) -> Ragged:
    """-beta * kl_t at each token, plus the outcome reward at the last (InstructGPT, 2203.02155).

    ``kl``: k1 per token, or None for no KL term. Raises ValueError where a sample's KL values are
    not as many as its tokens."""
    out: Ragged = []
    for i, length in enumerate(np.asarray(lengths, dtype=np.int64)):
        if kl is None or not valid[i]:
            tokens = np.zeros(length)
        else:
            tokens = -beta * np.asarray(kl[i], dtype=np.float64)
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
    value_lam: float | None = None,
) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimation (1506.02438, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = sum_l (gamma lam)^l delta_{t+l}, where the value
    after the last token is 0. lam = 1 gives the Monte Carlo return minus the value, lam = 0 the
    one-step TD error.

    ``rewards`` and ``values``: [T_i] per sample. Returns advantages and value targets A + V;
    ``value_lam`` gives the targets a lambda of their own. Raises ValueError where the lengths of
    rewards and values differ. Vectorised over samples."""
    lengths = np.array([len(r) for r in rewards], dtype=np.int64)
    if any(len(v) != n for v, n in zip(values, lengths, strict=True)):
        raise ValueError(
            f"GAE needs a value a token: rewards have {lengths.tolist()}, "
            f"values {[len(v) for v in values]}"
        )
    reward, value = _pad(rewards, lengths), _pad(values, lengths)
    next_value = np.concatenate([value[:, 1:], np.zeros((len(lengths), 1))], axis=1)
    next_value = next_value[:, : value.shape[1]]  # also where no sample has a token
    inside = np.arange(value.shape[1])[None, :] < lengths[:, None]
    delta = np.where(inside, reward + gamma * next_value - value, 0.0)
    advantage = _discounted(delta, gamma * lam)
    target = value + (advantage if value_lam is None else _discounted(delta, gamma * value_lam))
    return _unpad(advantage, lengths), _unpad(target, lengths)


def whiten(tokens: Sequence[np.ndarray], valid: np.ndarray) -> Ragged:
    """(A - mean) / std over all tokens of valid samples.

    Values that are equal up to rounding give 0, and so do invalid samples."""
    flat = np.concatenate([np.zeros(0), *(t for t, ok in zip(tokens, valid, strict=True) if ok)])
    mean = float(flat.mean()) if len(flat) else 0.0
    std = float(np.sqrt(_squared_deviations(flat) / len(flat))) if len(flat) else 0.0
    scale = 1.0 / std if std > RELATIVE_FLOOR * abs(mean) else 0.0
    return [
        (t - mean) * scale if ok else np.zeros_like(t) for t, ok in zip(tokens, valid, strict=True)
    ]


def explained_variance(returns: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> float:
    """1 - Var(R - V) / Var(R) over all tokens; nan where R does not vary.

    1 means a perfect critic, 0 one that is no better than a constant."""
    errors = [np.asarray(r) - np.asarray(v) for r, v in zip(returns, values, strict=True)]
    spread = _squared_deviations(np.concatenate([np.zeros(0), *returns]))
    error = _squared_deviations(np.concatenate([np.zeros(0), *errors]))
    return 1.0 - error / spread if spread > 0 else float("nan")


def _squared_deviations(values: np.ndarray) -> float:
    """Sum of squared deviations from the mean; 0 where there are no values."""
    return float(((values - values.mean()) ** 2).sum()) if len(values) else 0.0


def _to_go(tokens: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """sum_{l >= 0} gamma^l tokens_{t+l} at each t, float64 [T]."""
    return np.cumsum(tokens[::-1])[::-1] if gamma == 1.0 else _discounted(tokens[None, :], gamma)[0]


def _discounted(rows: np.ndarray, factor: float) -> np.ndarray:
    """sum_{l >= 0} factor^l rows[:, t+l] at each t, float64 [N, T]."""
    out, running = np.zeros_like(rows), np.zeros(len(rows))
    for t in range(rows.shape[1] - 1, -1, -1):
        running = rows[:, t] + factor * running
        out[:, t] = running
    return out


def _pad(ragged: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """A ragged list as float64 [N, T_max], with 0 after the end of each sample."""
    out = np.zeros((len(lengths), int(lengths.max(initial=0))))
    for row, values in zip(out, ragged, strict=True):
        row[: len(values)] = values
    return out


def _unpad(rows: np.ndarray, lengths: np.ndarray) -> Ragged:
    return [row[:n].copy() for row, n in zip(rows, lengths, strict=True)]
