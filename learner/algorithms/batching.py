"""Which sample goes to which optimizer step, rank and micro-batch: pure arithmetic on lengths.

The placement changes no gradient, because the weight of every token is fixed for the whole
optimizer step before. It only divides the work: ranks get nearly equal numbers of tokens, and a
micro-batch holds at most `budget` padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.modeling.packing import pack


class BatchingError(ValueError):
    """A sample cannot be placed; the message names the setting to raise."""


@dataclass(frozen=True)
class Placement:
    """Where each of N samples goes."""

    update: np.ndarray  # int64 [N]: index of the optimizer step
    rank: np.ndarray  # int64 [N]
    micro_batch: np.ndarray  # int64 [N]: index within the optimizer step and the rank
    micro_batches: tuple[int, ...]  # per optimizer step: number of micro-batches of each rank


def place(
    lengths: np.ndarray, groups: np.ndarray, updates: int, ranks: int, budget: int
) -> Placement:
    """Place samples of `lengths` (int [N], prompt + completion tokens) and `groups` (ids [N]).

    The samples of a group must be contiguous. Whole groups go to `updates` optimizer steps in
    their order, as evenly as possible. All ranks get the same number of micro-batches (some may be
    empty), because every backward pass is a collective under ZeRO. Raises BatchingError when one
    sample is longer than `budget` tokens or there are fewer groups than updates.
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
        count = 1
        for r in range(ranks):
            of_rank = members[rank[members] == r]
            micro[of_rank] = pack(lengths[of_rank], budget)
            if len(of_rank):
                count = max(count, int(micro[of_rank].max()) + 1)
        counts.append(count)
    return Placement(update, rank, micro, tuple(counts))


def balance(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """int64 [N]: rank of each sample.

    Samples are assigned from the longest to the shortest, each to the rank with the fewest tokens
    so far (ties: to the lowest rank)."""
    rank = np.zeros(len(lengths), np.int64)
    load = np.zeros(ranks, np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        rank[i] = int(load.argmin())
        load[rank[i]] += lengths[i]
    return rank
