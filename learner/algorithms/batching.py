"""Which sample goes to which optimizer step, rank and micro-batch: pure arithmetic on lengths.

The plan changes no gradient (every token's weight is fixed for the whole optimizer step before), only the work:
ranks carry nearly equal numbers of tokens, and a micro-batch holds at most `budget` padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.modeling.packing import pack


class BatchingError(ValueError):
    """A sample cannot be placed; the message names the setting to raise."""


@dataclass(frozen=True)
class Placement:
    """int64 [N] each: optimizer step, rank and micro-batch of every sample; `micro_batches[u]` of each rank."""

    update: np.ndarray
    rank: np.ndarray
    micro_batch: np.ndarray
    micro_batches: tuple[int, ...]


def place(
    lengths: np.ndarray, groups: np.ndarray, updates: int, ranks: int, budget: int
) -> Placement:
    """Place samples of `lengths` (int [N], prompt + completion tokens) and `groups` (ids [N], contiguous).

    Whole groups go to optimizer steps in their order, as evenly as can be. All ranks get the same number of
    micro-batches (some may be empty), because every backward pass is a collective under ZeRO.
    Raises BatchingError when one sample alone is over `budget` or there are fewer groups than updates.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and lengths.max() > budget:
        raise BatchingError(
            f"learner.micro_batch_tokens={budget}: a sample has {lengths.max()} tokens. "
            f"Set it to {lengths.max()} or more."
        )
    _, first = np.unique(groups, return_index=True)
    order = np.asarray(groups)[np.sort(first)]  # groups in order of appearance
    if len(order) < updates:
        raise BatchingError(
            f"learner.updates_per_batch={updates}: only {len(order)} groups are left to train on."
        )
    step_of_group = {
        g: u for u, part in enumerate(np.array_split(order, updates)) for g in part.tolist()
    }
    update = np.array([step_of_group[g] for g in np.asarray(groups).tolist()], np.int64)
    rank, micro = np.zeros_like(update), np.zeros_like(update)
    counts = []
    for u in range(updates):
        members = np.flatnonzero(update == u)
        rank[members] = balance(lengths[members], ranks)
        used = 0
        for r in range(ranks):
            mine = members[rank[members] == r]
            micro[mine] = pack(lengths[mine], budget)
            used = max(used, int(micro[mine].max()) + 1 if len(mine) else 0)
        counts.append(max(used, 1))
    return Placement(update, rank, micro, tuple(counts))


def balance(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """int64 [N]: rank of each sample, longest first to the rank with the fewest tokens (ties: lowest rank)."""
    rank = np.zeros(len(lengths), np.int64)
    load = np.zeros(ranks, np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        rank[i] = int(load.argmin())
        load[rank[i]] += lengths[i]
    return rank
