"""Math-Shepherd's labels by hand, and the exact check of the steps of a sum."""

from __future__ import annotations

import math

import pytest

from reward_service.step_labels.annotation import correlation, label, prefixes, step_labels
from reward_service.step_labels.steps import sum_steps

NAN = math.nan


def test_what_answers_share_is_completed_once() -> None:
    answers = [
        ([5, 6, 7, 8], [1, 2, 3]),
        ([5, 6, 9, 2], [1, 3]),
        ([5, 6, 7, 8], [1, 2, 3]),
        ([4, 2], [1]),
    ]
    assert prefixes(answers) == [(5, 6), (5, 6, 7)]  # the last end of each is the whole answer
    assert prefixes([([5, 6], [0, 1]), ([6, 5], [0, 1])]) == [(5,), (6,)]
    assert prefixes([]) == []


@pytest.mark.parametrize(
    "accuracy, wanted",
    [
        ([1, 0, 0, 1], (0.5, 1.0)),
        ([0, 0], (0.0, 0.0)),
        ([1], (1.0, 1.0)),
        ([NAN, 1, 0, NAN], (0.5, 1.0)),  # not judged: neither right nor wrong
        ([NAN, 0], (0.0, 0.0)),
        ([0.9, 1.0], (0.5, 1.0)),  # a verifier's partial score is not right
        ([NAN, NAN], None),
        ([], None),
    ],
)
def test_label(accuracy: list[float], wanted: tuple[float, float] | None) -> None:
    assert label(accuracy) == wanted


def test_labels_of_an_answer() -> None:
    found = {(5,): (0.75, 1.0), (5, 6, 7): (0.0, 0.0), (9,): None}
    assert step_labels([5, 6, 7, 8], [0, 2, 3], 0.0, found) == [(0.75, 1.0), (0.0, 0.0), (0.0, 0.0)]
    assert step_labels([5, 2], [0, 1], 1.0, found) == [(0.75, 1.0), (1.0, 1.0)]
    assert step_labels([5], [0], 1.0, found) == [
        (1.0, 1.0)
    ]  # one step: its prefix is not asked for
    assert step_labels([5, 2], [0, 1], NAN, found) is None
    assert step_labels([9, 2], [0, 1], 1.0, found) is None


def test_correlation() -> None:
    assert correlation([0, 1, 0, 1], [0.1, 0.9, 0.1, 0.9]) == pytest.approx(1.0)
    assert correlation([0, 0, 1, 1], [1, 0, 1, 0]) == pytest.approx(0.0)
    # by hand: deviations (-1, 0, 1) and (-1, 1, 0), covariance 1, variances 2 and 2
    assert correlation([1, 2, 3], [0, 2, 1]) == pytest.approx(0.5)
    assert correlation([1, 1, 1], [0, 1, 0]) is None and correlation([1], [1]) is None


@pytest.mark.parametrize(
    "reasoning, wanted",
    [
        ("12+30=42+4=46+5=51", [1, 1, 1]),
        ("12+30=42+4=47+5=52", [1, 0, 0]),  # the last adds up, from a wrong total
        ("12+30=42+4=47+5=51", [1, 0, 0]),  # a second slip that hits the answer
        ("12+30=42+4=46+5=52 wait 46+5=51", [1, 1, 0, 1]),
        ("12+30=42+4=47+5=52 wait 47+5=52", [1, 0, 0, 0]),
        ("12+34=46+5=51", [0, 1]),  # not a step of the worked form; its end is
        ("12+30=42+5=47", [1, 0]),
        ("easy", []),
    ],
)
def test_exact_steps_of_a_sum(reasoning: str, wanted: list[int]) -> None:
    response = f"<think>{reasoning}</think><answer>51</answer>"
    found = sum_steps("12+34+5=?", response)
    assert [right for _, right in found] == [bool(w) for w in wanted]
    for end, _ in found:
        assert response[end - 1].isdigit() and not response[end].isdigit()


def test_numbers_without_tens_or_units_have_one_step_each() -> None:
    assert sum_steps("9+40+7=?", "<think>9+40=49+7=56") == [(14, True), (19, True)]
    assert sum_steps("9+40+7=?", "<think>9+4") == []
