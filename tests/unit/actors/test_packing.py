"""Packed batches by hand, and outputs that come back in the order of the sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.modeling.packing import PackedBatch, TokenSequence, pack, pack_sequences, run_packed


def sequence(ids: list[int], begin: int, positions: list[int]) -> TokenSequence:
    return TokenSequence(np.array(ids, np.int32), begin, np.array(positions))


def test_a_packed_batch_by_hand() -> None:
    batch = PackedBatch.of(
        [sequence([5, 18, 3], 1, [1, 2]), sequence([7, 8, 9, 4, 2], 2, [4])], "cpu"
    )
    assert batch.ids.tolist() == [[5, 18, 3, 0, 0], [7, 8, 9, 4, 2]]
    assert batch.begins.tolist() == [1, 2]
    assert (batch.rows.tolist(), batch.columns.tolist()) == ([0, 0, 1], [1, 2, 4])
    for tensor in (batch.ids, batch.begins, batch.rows, batch.columns):
        assert tensor.dtype == torch.int64
    assert [p.tolist() for p in batch.split(torch.tensor([1.0, 2.0, 3.0]))] == [[1.0, 2.0], [3.0]]


def test_a_completion_is_read_at_each_of_its_tokens() -> None:
    s = TokenSequence.of_completion(np.array([5, 18]), np.array([3, 21, 2]))
    assert (s.ids.tolist(), s.begin, s.positions.tolist()) == ([5, 18, 3, 21, 2], 2, [2, 3, 4])


def test_pack_puts_similar_lengths_together_within_the_budget() -> None:
    # Longest first. 30 is over the budget and goes alone; 9 and 8 need 2 * 9 = 18, with 7 it is 27.
    assert pack(np.array([7, 9, 2, 8, 30]), 18).tolist() == [2, 1, 2, 1, 0]


@pytest.mark.parametrize("budget", [1, 12, 1000])
def test_outputs_come_back_in_the_order_of_the_sequences(budget: int) -> None:
    rng = np.random.default_rng(0)
    sequences = []
    for length in (3, 9, 1, 5, 9):
        positions = sorted(rng.choice(length, min(length, 3), False).tolist())
        sequences.append(sequence(rng.integers(1, 99, length).tolist(), 0, positions))
    calls = []
    outputs = run_packed(
        lambda b: b.ids[b.rows, b.columns].float(),
        sequences,
        pack_sequences(sequences, budget),
        "cpu",
        before=lambda: calls.append(1),
    )
    for s, output in zip(sequences, outputs, strict=True):
        assert output.tolist() == s.ids[s.positions].tolist()
    assert len(calls) == {1: 5, 12: 4, 1000: 1}[budget]


def test_a_micro_batch_without_sequences_still_runs() -> None:
    """Under ZeRO the other ranks wait for it."""
    widths = []

    def forward(batch: PackedBatch) -> torch.Tensor:
        widths.append(tuple(batch.ids.shape))
        return batch.columns.float()

    only = [sequence([4, 5, 6], 1, [2])]
    assert [o.tolist() for o in run_packed(forward, only, np.array([1]), "cpu", 3)] == [[2.0]]
    assert widths == [(1, 2), (1, 3), (1, 2)]
    assert run_packed(forward, [], np.zeros(0, np.int64), "cpu") == []
