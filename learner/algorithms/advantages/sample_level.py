"""Advantages with one value per sample: pure float64 functions of rewards and group ids.

Each takes ``rewards`` float64 [N], ``groups`` int [N] (any ids, unequal sizes) and ``valid``
bool [N] (the status of the reward is ok), and returns float64 [N], 0 for invalid samples. An
invalid reward (nan, for example) never enters a baseline.

A group whose rewards are equal up to rounding gives exactly 0. So does a group with one valid
sample, because it has no baseline.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from learner.algorithms.advantages.group_statistics import (
    centred,
    checked,
    divided_by_std,
    group_stats,
)

SampleLevel = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
SAMPLE_LEVEL: dict[str, SampleLevel] = {}


def sample_level(function: SampleLevel) -> SampleLevel:
    """Register a function as `algorithm.advantage` under its own name."""
    SAMPLE_LEVEL[function.__name__] = function
    return function


@sample_level
def grpo(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """(r - mean) / std of its group, population std (DeepSeekMath, 2402.03300, section 4.1.2)."""
    stats = group_stats(rewards, groups, valid)
    return divided_by_std(centred(rewards, valid, stats), stats)


@sample_level
def dr_grpo(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """r - mean of its group (Dr. GRPO, 2503.20783, section 3.2)."""
    return centred(rewards, valid, group_stats(rewards, groups, valid))


@sample_level
def rloo(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """r - mean of the others of its group = G/(G-1) (r - mean) (Ahmadian et al., 2402.14740)."""
    stats = group_stats(rewards, groups, valid)
    factor = stats.count / np.maximum(stats.count - 1, 1)
    return centred(rewards, valid, stats) * factor[stats.index]


@sample_level
def reinforce_pp_baseline(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """r - mean of its group, divided by the std over the batch (REINFORCE++, 2501.03262).

    The batch mean is 0 by construction. Groups with one valid sample do not enter the batch std."""
    stats = group_stats(rewards, groups, valid)
    values = centred(rewards, valid, stats)
    used = np.asarray(valid, dtype=bool) & (stats.count >= 2)[stats.index]
    std = np.sqrt(np.mean(values[used] ** 2)) if used.any() else 0.0
    return values / std if std > 0 else values


@sample_level
def constant(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """1 for each valid sample: the gradient coefficient of SFT."""
    return np.asarray(valid, dtype=bool).astype(np.float64)


@sample_level
def correct(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """I(correct) (RFT and Online RFT; DeepSeekMath, 2402.03300, appendix A.1).

    ``rewards`` must be accuracies in [0, 1]."""
    checked(rewards, groups, valid)
    return (np.asarray(valid, dtype=bool) & (np.nan_to_num(rewards) >= 1.0)).astype(np.float64)


@sample_level
def reward(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The reward itself: REINFORCE without a baseline."""
    checked(rewards, groups, valid)
    return np.where(valid, rewards, 0.0)


def dpo(log_ratios: np.ndarray, chosen: np.ndarray, groups: np.ndarray, beta: float) -> np.ndarray:
    """DPO's gradient coefficient (2305.18290, equation 7), float64 [N].

    It is +beta sigma(-margin) for the chosen and -beta sigma(-margin) for the rejected answer of a
    pair, with margin = beta (log_ratio of the chosen - log_ratio of the rejected). With the
    `reinforce` loss it gives the gradient of the DPO loss.

    ``log_ratios`` float [N]: log pi(o) - log pi_ref(o) in nats, summed over tokens (or averaged,
    as in DeepSeekMath, 2402.03300, appendix A.1.4, whose coefficient leaves out beta); ``chosen``
    bool [N]; ``groups`` [N] names the pair. Raises ValueError unless each group is one pair."""
    ids, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    chosen = np.asarray(chosen, dtype=bool)
    chosen_counts = np.bincount(index, chosen, len(ids))
    if not ((counts == 2) & (chosen_counts == 1)).all():
        bad = int(np.flatnonzero((counts != 2) | (chosen_counts != 1))[0])
        raise ValueError(
            f"pair {ids[bad]} has {counts[bad]} answers, {int(chosen_counts[bad])} of them chosen: "
            "expected one and one rejected"
        )
    sign = np.where(chosen, 1.0, -1.0)
    margin = beta * np.bincount(index, sign * np.asarray(log_ratios, dtype=np.float64), len(ids))
    return (sign * beta * np.exp(-np.logaddexp(0.0, margin))[index]).astype(np.float64)


def overlong_penalty(lengths: np.ndarray, max_tokens: int, cache: int) -> np.ndarray:
    """DAPO's soft overlong punishment (2503.14476, equation 13), to be added to the rewards.

    ``lengths`` [N] in tokens. Returns float64 [N]: 0 up to max_tokens - cache tokens, then linear
    down to -1 at max_tokens. Raises ValueError unless 0 < cache <= max_tokens."""
    if not 0 < cache <= max_tokens:
        raise ValueError(
            f"overlong cache={cache} tokens: expected in (0, rollout.max_tokens={max_tokens}]"
        )
    return np.clip((max_tokens - cache - np.asarray(lengths, dtype=np.float64)) / cache, -1.0, 0.0)
