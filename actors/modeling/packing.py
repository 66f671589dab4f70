"""How sequences of unequal length share a forward pass.

Every forward pass of the project without a generator goes through `PackedBatch`: reference
log-probs, scores of reward models, and the micro-batches of the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """A prompt with its completion, and the positions at which a model's output is read.

    ids: int [T], token ids of the prompt, then of the completion.
    begin: index in `ids` of the first completion token, which is the length of the prompt.
    positions: int [K], indices in `ids`.

    A prompt [5, 18] with the completion [3, 21, 2], read at each completion token:
    TokenSequence(ids=[5, 18, 3, 21, 2], begin=2, positions=[2, 3, 4]).
    """

    ids: np.ndarray
    begin: int
    positions: np.ndarray

    @staticmethod
    def of_completion(prompt: np.ndarray, completion: np.ndarray) -> TokenSequence:
        """Return the sequence that is read at every completion token."""
        ids = np.concatenate([prompt, completion])
        return TokenSequence(ids, len(prompt), np.arange(len(prompt), len(ids)))


# Under ZeRO every forward and backward pass is a collective. A rank without a sequence in a
# micro-batch runs this one instead and drops the result.
FILLER = TokenSequence(np.zeros(2, np.int64), 1, np.ones(1, np.int64))


@dataclass(frozen=True)
class PackedBatch:
    """Sequences as one right-padded tensor, and where it is read. M is the sum of `counts`.

    ids: int64 [B, T], padded with 0.
    begins: int64 [B], index of the first completion token.
    rows, columns: int64 [M], so that `ids[rows, columns]` are the tokens that are read, sequence by
    sequence.
    counts: how many of them belong to each sequence.
    """

    ids: Tensor
    begins: Tensor
    rows: Tensor
    columns: Tensor
    counts: list[int]

    @staticmethod
    def of(sequences: Sequence[TokenSequence], device: Any) -> PackedBatch:
        """Return the batch of at least one sequence, in the given order, on `device`."""
        ids = np.zeros((len(sequences), max(len(s.ids) for s in sequences)), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.ids)] = sequence.ids
        counts = [len(s.positions) for s in sequences]
        begins = np.array([s.begin for s in sequences], np.int64)
        rows = np.repeat(np.arange(len(sequences)), counts)
        columns = np.concatenate([s.positions for s in sequences]).astype(np.int64)
        tensors = [torch.from_numpy(a).to(device) for a in (ids, begins, rows, columns)]
        return PackedBatch(*tensors, counts)

    def split(self, values: Tensor) -> list[np.ndarray]:
        """Return `values` [M] as one array [K] for each sequence, on the CPU."""
        return [piece.numpy() for piece in values.cpu().split(self.counts)]


def pack(lengths: np.ndarray, budget: int) -> np.ndarray:
    """Return the number of the micro-batch of each sequence, int64 [N], counting from 0.

    lengths: int [N], in tokens. A micro-batch holds at most `budget` tokens with its padding; a
    longer sequence gets a micro-batch of its own. Sequences are assigned longest first, so that
    those of a micro-batch have similar lengths and need little padding.
    """
    micro_batches = np.zeros(len(lengths), np.int64)
    index, width, rows = -1, 0, 0
    for i in np.argsort(-lengths, kind="stable"):
        if index < 0 or (rows + 1) * width > budget:
            index, width, rows = index + 1, int(lengths[i]), 0
        micro_batches[i] = index
        rows += 1
    return micro_batches


def pack_sequences(sequences: Sequence[TokenSequence], budget: int) -> np.ndarray:
    """Return `pack` of the lengths of `sequences`."""
    return pack(np.array([len(s.ids) for s in sequences], np.int64), budget)


def run_packed(
    forward: Callable[[PackedBatch], Tensor],
    sequences: Sequence[TokenSequence],
    micro_batches: np.ndarray,
    device: Any,
    count: int = 0,
    before: Callable[[], object] = lambda: None,
) -> list[np.ndarray]:
    """Run a model over micro-batches without gradient; return its output [K] for each sequence.

    forward: gives the output [M] of a PackedBatch.
    micro_batches: int [N], the micro-batch of each sequence.
    count: how many micro-batches to run if more than the sequences have; the others run FILLER.
    before: called before each micro-batch.
    """
    outputs: list[Any] = [None] * len(sequences)
    with torch.no_grad():
        for m in range(max(count, int(micro_batches.max(initial=-1)) + 1)):
            before()
            members = np.flatnonzero(micro_batches == m)
            batch = PackedBatch.of([sequences[i] for i in members] or [FILLER], device)
            pieces = batch.split(forward(batch))
            # FILLER stands for no member, and its output is dropped.
            for i, piece in zip(members, pieces, strict=False):
                outputs[i] = piece
    return outputs
