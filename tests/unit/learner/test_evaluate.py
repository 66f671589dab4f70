"""Evaluation measures against brute force over all subsets and numbers worked by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from learner.evaluation.measures import (
    best_of_n,
    maj_at_k,
    pass_at_k,
    rerank,
    summarise,
    weighted_maj_at_k,
)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(
                sum(any(s) for s in subsets) / len(subsets), abs=1e-12
            )


def test_pass_at_k_with_all_samples_is_one_if_any_is_right():
    assert pass_at_k(4, 1, 4) == 1.0  # drawing with replacement would say 0.68
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)  # no overflow


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1), (4, -1, 2)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_maj_at_k_by_hand():
    answers = ["7", "8", "7", "8", "8", "9"]
    correct = [True, False, True, False, False, False]
    assert maj_at_k(answers, correct, 3) == 0.5  # 7 wins the first block, 8 the second
    # Ties go to the first seen: 7 and 7 win, then 8.
    assert maj_at_k(answers, correct, 2) == pytest.approx(2 / 3)
    assert maj_at_k(answers, correct, 6) == 0.0  # 8 three times
    assert maj_at_k(answers, correct, 1) == pytest.approx(2 / 6)
    assert maj_at_k(answers, correct, 4) == 1.0  # 7, 8, 7, 8: first seen; the last two are left out


def test_maj_at_k_no_answer_does_not_vote():
    assert maj_at_k(["", "", "5"], [False, False, True], 3) == 1.0
    assert maj_at_k(["", "", ""], [False] * 3, 3) == 0.0
    with pytest.raises(ValueError, match="maj@4 needs at least 4 samples"):
        maj_at_k(["1"] * 3, [True] * 3, 4)
    with pytest.raises(ValueError, match="2 answers but 1 grades"):
        maj_at_k(["1", "2"], [True], 1)


def test_summary_by_hand_in_any_order_of_rows():
    rows = [  # prompt, index, correct, format, extracted, length
        ("b", 1, 1.0, 1.0, "4", 10), ("a", 3, 1.0, 1.0, "2", 2), ("a", 0, 0.0, 0.0, "", 4),
        ("b", 0, 1.0, 1.0, "4", 10),
        ("a", 1, 1.0, 1.0, "2", 6), ("a", 2, 0.0, 1.0, "3", 8), ("b", 2, None, None, "", 16),
        ("b", 3, 0.0, 1.0, "5", 8),
    ]  # fmt: skip
    got = summarise(*map(list, zip(*rows, strict=True)), ks=(1, 2, 4), maj_k=2)
    assert got["pass@1"] == pytest.approx((2 / 4 + 2 / 3) / 2)
    assert got["pass@2"] == pytest.approx(((1 - 1 / 6) + 1) / 2)
    assert got["pass@4"] == 1.0  # prompt a only: b has three graded samples
    # a: ("", 2) -> right; (3, 2) -> tie, 3 first, wrong. b: (4, 4) right; the third is left over.
    assert got["maj@2"] == pytest.approx((0.5 + 1) / 2)
    assert got["format"] == pytest.approx(6 / 7) and got["length"] == pytest.approx(8.0)
    assert (got["prompts"], got["samples"], got["ungraded"]) == (2, 8, 1)


def test_summary_says_none_where_it_cannot_know():
    got = summarise(["a"], [0], [None], [None], [""], [3])
    assert (
        got["pass@1"] is None
        and got["pass@64"] is None
        and got["maj@8"] is None
        and got["format"] is None
    )
    assert got["ungraded"] == 1 and got["length"] == 3.0


def test_best_of_n_by_hand() -> None:
    scores, correct = (
        [0.1, 0.9, 0.5, 0.5, 0.2, 0.3, 9.0],
        [True, False, True, False, False, True, True],
    )
    assert best_of_n(scores, correct, 2) == pytest.approx(
        (0 + 1 + 1) / 3
    )  # the seventh is left over; a tie: the first
    assert best_of_n(scores, correct, 3) == 0.0 and best_of_n(
        scores[1:], correct[1:], 3
    ) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="best@8 needs at least 8"):
        best_of_n(scores, correct, 8)


def test_weighted_votes_by_hand() -> None:
    extracted, correct = ["7", "8", "8", ""], [True, False, False, False]
    assert maj_at_k(extracted, correct, 4) == 0.0
    assert (
        weighted_maj_at_k(extracted, correct, [0.9, 0.4, 0.4, 5.0], 4) == 1.0
    )  # no answer, no vote
    assert weighted_maj_at_k(extracted, correct, [0.7, 0.4, 0.4, 5.0], 4) == 0.0
    assert weighted_maj_at_k(["", ""], [False, False], [1.0, 1.0], 2) == 0.0


def test_rerank_takes_the_same_samples_for_every_measure() -> None:
    names = ["a", "b", "a", "b", "a", "b"]
    correct = [1.0, 0.0, 0.0, 1.0, math.nan, 1.0]
    extracted = ["5", "6", "4", "7", "5", "7"]
    orm = [0.9, 0.1, 0.2, 0.4, 0.5, math.nan]
    found = rerank(names, correct, extracted, {"orm": orm, "raw": [-v for v in range(6)]}, 2)
    # a: samples 0 and 2 (the fifth has no grade); b: samples 1 and 3 (the sixth has no score)
    assert found == {
        "maj@2": 0.5,
        "best@2/orm": 1.0,
        "weighted_maj@2/orm": 1.0,
        "best@2/raw": 0.5,
        "weighted_maj@2/raw": None,
    }
    assert rerank(names, correct, extracted, {"orm": orm}, 3)["best@3/orm"] is None
