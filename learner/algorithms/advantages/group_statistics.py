"""Statistics of the rewards of each group, which every group-relative advantage starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A spread below this share of the largest |reward| is a rounding error: float32 sums err by 1e-7.
RELATIVE_FLOOR = 1e-6


@dataclass(frozen=True)
class GroupStats:
    """Statistics per group over its valid samples; arrays of shape [G], in order of group id.

    Only ``index`` has one entry per sample."""

    ids: np.ndarray  # the group ids
    index: np.ndarray  # int [N]: position in ``ids`` of each sample's group
    count: np.ndarray  # int64: number of valid samples
    mean: np.ndarray  # float64; 0 where count is 0
    std: np.ndarray  # float64, of the population; exactly 0 where rewards are equal up to rounding
    alive: np.ndarray  # bool: std > 0, which takes at least two valid samples


def group_stats(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> GroupStats:
    """Count, mean and population std of the valid rewards of each group.

    ``rewards`` float [N], ``groups`` [N], ``valid`` bool [N]. Raises ValueError when a valid
    reward is not finite or the shapes differ."""
    rewards, groups, valid = checked(rewards, groups, valid)
    ids, index = np.unique(groups, return_inverse=True)
    size = len(ids)
    valid_rewards = np.where(valid, rewards, 0.0)
    count = np.bincount(index, valid.astype(np.float64), size)
    mean = np.bincount(index, valid_rewards, size) / np.maximum(count, 1)
    deviation = np.where(valid, rewards - mean[index], 0.0) if size else valid_rewards
    std = np.sqrt(np.bincount(index, deviation**2, size) / np.maximum(count, 1))
    largest = np.zeros(size)
    np.maximum.at(largest, index, np.abs(valid_rewards))
    std[std <= RELATIVE_FLOOR * largest] = 0.0
    return GroupStats(ids, index, count.astype(np.int64), mean, std, std > 0)


def centred(rewards: np.ndarray, valid: np.ndarray, stats: GroupStats) -> np.ndarray:
    """r - mean of the group, float64 [N]; exactly 0 for invalid samples and dead groups."""
    use = np.asarray(valid, dtype=bool) & stats.alive[stats.index]
    return np.where(use, np.asarray(rewards, dtype=np.float64) - stats.mean[stats.index], 0.0)


def divided_by_std(values: np.ndarray, stats: GroupStats) -> np.ndarray:
    """Values [N] divided by the std of their group; those of a dead group stay as they are."""
    return values / np.where(stats.alive, stats.std, 1.0)[stats.index]


def checked(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three as arrays. Raises ValueError unless they have one shape [N] and every valid
    reward is finite."""
    rewards, groups = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    valid = np.asarray(valid, dtype=bool)
    if not rewards.shape == groups.shape == valid.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {rewards.shape}, groups {groups.shape}, valid {valid.shape}: "
            "expected three of one shape [N]"
        )
    if not np.isfinite(rewards[valid]).all():
        bad = int(np.flatnonzero(valid & ~np.isfinite(rewards))[0])
        raise ValueError(
            f"reward {rewards[bad]} of sample {bad} has status ok: a reward that is not finite "
            "must not"
        )
    return rewards, groups, valid
