"""Placement: every sample once, whole groups, budgets, balanced ranks, equal micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.batching import BatchingError, balance, pack, place


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int, int]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    ids = draw(
        st.lists(st.integers(-50, 50), min_size=len(sizes), max_size=len(sizes), unique=True)
    )
    groups = np.repeat(ids, sizes)
    lengths = np.array(
        draw(st.lists(st.integers(1, 60), min_size=len(groups), max_size=len(groups)))
    )
    updates = draw(st.integers(1, len(sizes)))
    return lengths, groups, updates, draw(st.integers(1, 4)), draw(st.integers(60, 400))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_placement(problem: tuple[np.ndarray, np.ndarray, int, int, int]) -> None:
    lengths, groups, updates, ranks, budget = problem
    found = place(lengths, groups, updates, ranks, budget)
    for column in (found.update, found.rank, found.micro_batch):
        assert column.shape == lengths.shape  # every sample has exactly one place
    assert set(found.update.tolist()) == set(range(updates))
    assert (0 <= found.rank).all() and (found.rank < ranks).all()
    assert len(found.micro_batches) == updates
    sizes = []
    for g in dict.fromkeys(groups.tolist()):
        assert len(set(found.update[groups == g].tolist())) == 1, (
            "a group was torn between optimizer steps"
        )
    assert (np.diff(found.update) >= 0).all()  # in the order given
    for u in range(updates):
        step = found.update == u
        sizes.append(len(set(groups[step].tolist())))
        assert (found.micro_batch[step] < found.micro_batches[u]).all() and found.micro_batches[
            u
        ] >= 1
        loads = np.zeros(ranks)
        for r in range(ranks):
            mine = step & (found.rank == r)
            loads[r] = lengths[mine].sum()
            for m in np.unique(found.micro_batch[mine]):
                member = lengths[mine & (found.micro_batch == m)]
                assert member.max() * len(member) <= budget
        # Longest first to the least loaded: two ranks never differ by more than one sample.
        assert loads.max() - loads.min() <= lengths[step].max()
        used = {
            m for r in range(ranks) for m in found.micro_batch[step & (found.rank == r)].tolist()
        }
        assert used == set(range(found.micro_batches[u])), "a micro-batch is empty on every rank"
    assert max(sizes) - min(sizes) <= 1


def test_by_hand() -> None:
    found = place(np.array([10, 40, 20, 30, 5, 5]), np.array([7, 7, 3, 3, 9, 9]), 1, 2, 60)
    # 40 -> rank 0; 30 -> 1; 20 -> 1 (30 < 40); 10 -> 0; 5 -> 0 (50 = 50, lowest); 5 -> 1.
    assert found.rank.tolist() == [0, 0, 1, 1, 0, 1]
    # Rank 0: 40 | 10 5 (2 x 40 is over 60). Rank 1: 30 20 (2 x 30) | 5.
    assert found.micro_batch.tolist() == [1, 0, 0, 0, 1, 1]
    assert found.micro_batches == (2,)


def test_one_budget_for_all_gives_one_micro_batch() -> None:
    assert place(np.full(8, 10), np.repeat([0, 1], 4), 1, 1, 80).micro_batches == (1,)
    assert place(np.full(8, 10), np.repeat([0, 1], 4), 1, 1, 79).micro_batches == (2,)
    assert place(np.full(8, 10), np.repeat([0, 1], 4), 1, 1, 10).micro_batches == (8,)


def test_fewer_samples_than_ranks_leaves_a_rank_idle_but_in_step() -> None:
    found = place(np.array([10]), np.array([0]), 1, 3, 100)
    assert found.rank.tolist() == [0] and found.micro_batches == (1,)


def test_errors_name_the_setting() -> None:
    with pytest.raises(
        BatchingError, match="learner.micro_batch_tokens=50: a sample has 51 tokens"
    ):
        place(np.array([51]), np.array([0]), 1, 1, 50)
    with pytest.raises(BatchingError, match="learner.updates_per_batch=2: only 1 groups"):
        place(np.array([5, 5]), np.array([0, 0]), 2, 1, 50)


def test_pack_and_balance_of_nothing() -> None:
    assert pack(np.zeros(0, np.int64), 10).tolist() == []
    assert balance(np.zeros(0, np.int64), 2).tolist() == []
