"""Buckets of parameters: split by size, flat bytes, and back as the same tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from actors.records import Entry
from learner.engine.weights import buckets, flatten, full_numel


def parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    shapes = [("a", (3, 5), torch.float32), ("b", (7,), torch.float32), ("c", (1,), torch.bfloat16),
              ("d", (4, 4, 2), torch.float64), ("e", (2, 3), torch.float32)]  # fmt: skip
    return [(n, nn.Parameter(torch.randn(s).to(t))) for n, s, t in shapes]


def read(buffer: object, entry: Entry) -> torch.Tensor:
    """Written from the record's description, apart from the code that generators use."""
    dtype = getattr(torch, entry.dtype)
    size = torch.Size(entry.shape).numel() * dtype.itemsize
    content = torch.tensor(buffer[entry.offset : entry.offset + size])  # type: ignore
    return content.view(dtype).reshape(entry.shape)


def test_round_trip_is_exact() -> None:
    group = parameters()
    group.append(("t", nn.Parameter(torch.randn(4, 6).t())))  # not contiguous
    buffer, entries = flatten(group)
    assert [e.name for e in entries] == [n for n, _ in group]
    for (_, p), e in zip(group, entries, strict=True):
        assert e.offset % 16 == 0
        assert torch.equal(read(buffer, e), p)
        assert read(buffer, e).dtype == p.dtype


def test_nan_and_infinity_survive_as_bits() -> None:
    buffer, entries = flatten(
        [("x", nn.Parameter(torch.tensor([float("nan"), float("-inf"), -0.0])))]
    )
    found = read(buffer, entries[0])
    assert found[0].isnan() and found[1] == -float("inf") and found[2].signbit()


@pytest.mark.parametrize("limit", [1, 60, 100, 128, 10_000])
def test_buckets_hold_everything_once_in_order_within_the_limit(limit: int) -> None:
    everything = parameters()
    found = list(buckets(everything, limit))
    assert [n for group in found for n, _ in group] == [n for n, _ in everything]
    for group in found:
        size = sum(p.numel() * p.element_size() for _, p in group)
        assert size <= limit or len(group) == 1
    for one, two in zip(found, found[1:], strict=False):  # none smaller than need be
        first = two[0][1]
        assert (
            sum(p.numel() * p.element_size() for _, p in one) + first.numel() * first.element_size()
            > limit
        )


def test_zero3_shards_count_with_their_whole_size() -> None:
    shard = nn.Parameter(torch.zeros(0))
    shard.ds_numel = 1000  # type: ignore[attr-defined]
    assert full_numel(shard) == 1000
    assert [len(g) for g in buckets([("a", shard), ("b", shard)], 4000)] == [1, 1]
    assert [len(g) for g in buckets([("a", shard), ("b", shard)], 8000)] == [2]


def test_padding_between_entries_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum covers the gaps too, so they must not hold whatever memory held before."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, 171).astype(dtype))
    group = parameters()
    buffer, entries = flatten(group)
    used = np.zeros(len(buffer), bool)
    for (_, p), e in zip(group, entries, strict=True):
        used[e.offset : e.offset + p.numel() * p.element_size()] = True
    assert not used.all() and not buffer[~used].any()
