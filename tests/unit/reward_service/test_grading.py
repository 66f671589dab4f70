"""The grader is right on every case of the shared set and of our own, is fast, and runs no code."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from benchmarks.reward_items import adversarial
from reward_service.math import extraction, grading, reading
from reward_service.math.text import MONEY, Token, Unreadable
from reward_service.rules import tasks
from reward_service.rules.format import format_reward
from reward_service.rules.item import RewardItem
from reward_service.rules.scorer import Scorer, score_safely

DATA = Path(__file__).parents[2] / "data" / "grading"
CASES = [json.loads(line) for line in open(DATA / "cases.jsonl", encoding="utf-8")]
OWN = [json.loads(line) for line in open(DATA / "own_cases.jsonl", encoding="utf-8")]
KINDS = sorted({case["kind"] for case in OWN})


def item_of(case: dict) -> RewardItem:
    repeat = case.get("repeat") or {}
    text = (
        case.get("prefill", "")
        + case["completion"]
        + repeat.get("text", "") * repeat.get("times", 0)
    )
    extra = {key: case[key] for key in ("numbers", "target") if key in case}
    text += repeat.get("then", "")
    return RewardItem(case["id"], text, case["gold"], task=case.get("task", "math"), extra=extra)


def judge(answer: str, gold: str) -> float:
    return tasks.grade(
        RewardItem("x", f"<think>w</think><answer>{answer}</answer>", gold), {}
    ).accuracy


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_shared_case(case: dict) -> None:
    item, start = item_of(case), time.monotonic()
    grade = tasks.grade(item, {})
    assert grade.accuracy == case["expect_accuracy"], grade
    assert grade.status == "ok" and (grade.accuracy or grade.reason)
    assert case["expect_format"] in (None, format_reward(item.response))
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize("kind", KINDS)
def test_own_cases_of_the_same_kinds(kind: str) -> None:
    wrong = [
        case
        for case in OWN
        if case["kind"] == kind and judge(case["answer"], case["gold"]) != case["accuracy"]
    ]
    assert not wrong


@pytest.mark.parametrize(
    "answer, gold",
    [
        ("(" * 3000 + "6" + ")" * 3000, "6"),
        ("10^{10^{10}}", "1"),
        ("2^{-10^{9}}", "0"),
        ("1e999999999", "3"),
        ("999999!", "1"),
        ("e^{e^{e^{e^{10}}}}", "1"),
        ("(x+y+z)^{1000}-(x+y+z)^{999}", "0"),
        (r"\sin(10^{100})", "0"),
        ("{" * 100_000, "1"),
        ("7" + "+0" * 50_000, "7"),
        ("x^" * 500 + "1", "1"),
        (r"\binom{10^9}{5}", "1"),
        (r"\sqrt{" * 200 + "1" + "}" * 200, "1"),
    ],
)
def test_what_is_too_costly_to_evaluate_is_wrong_and_quick(answer: str, gold: str) -> None:
    start = time.monotonic()
    assert judge(answer, gold) == 0.0
    assert time.monotonic() - start < 2.0


def test_text_identical_to_the_gold_matches_however_long() -> None:
    digits = "37" * 60_000
    assert judge(digits, digits) == 1.0
    assert judge(digits[:-1] + "8", digits) == 0.0


def test_tiny_differences_count() -> None:
    assert judge(r"\sqrt{2}+10^{-900}", r"\sqrt{2}") == 0.0
    assert judge(r"\pi+e^{-4000}", r"\pi") == 0.0
    assert judge(r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}") == 1.0


def test_a_verdict_says_what_was_read_and_why() -> None:
    grade = grading.grade_math("The total is 64 marbles.", "65")
    assert grade.extracted == "The total is 64 marbles."
    assert "differ" in grade.reason and "64" in grade.reason and "marbles" in grade.reason
    assert "more than one value" in grading.grade_math("64 sheep on 3 hills", "64").reason
    assert "units differ" in grading.grade_math("7 cm", "7 m").reason


@pytest.mark.parametrize("gold", ["", "   ", "####  ", r"\boxed{}", r"\frac{1}{"])
def test_a_gold_that_cannot_be_read_is_ungradable_and_no_zero(gold: str) -> None:
    result = score_safely(
        Scorer({"rules": {"accuracy": 1.0}}), RewardItem("x", "<answer>5</answer>", gold)
    )
    assert result.status == "ungradable" and math.isnan(result.total) and result.reason
    assert "accuracy" not in result.parts


def test_an_unclosed_box_is_an_error_of_the_reader_alone() -> None:
    with pytest.raises(Unreadable):
        extraction.last_box(r"\boxed{4")
    assert extraction.last_box(r"\boxed{\frac{1}{2}} \fbox{3}") == "3"
    assert extraction.last_box("4") is None


@pytest.mark.parametrize(
    "expression, numbers, target, accuracy",
    [
        ("(6 - 2) * (5 + 1)", [6, 2, 5, 1], 24, 1.0),
        ("(6-2)×(5+1) = 24", [6, 2, 5, 1], 24, 1.0),
        ("(6-2)*(5+1) = 25", [6, 2, 5, 1], 24, 0.0),
        ("-2 + 26", [2, 26], 24, 1.0),
        ("48 ÷ 2", [48, 2], 24, 1.0),
        (r"\boxed{48/2}", [48, 2], 24, 1.0),
        ("48 // 2", [48, 2], 24, 0.0),
        ("(48/2", [48, 2], 24, 0.0),
        ("26\n-2", [26, 2], 24, 1.0),
        ("24 = 26 - 2", [26, 2], 24, 0.0),
        ("abs(26)-2", [26, 2], 24, 0.0),
        ("2 6 - 2", [26, 2], 24, 0.0),
        ("1/3*3", [1, 3, 3], 1, 1.0),
        ("(5)(2)", [5, 2], 10, 0.0),
        ("24.0", [24], 24, 0.0),
        ("5!", [5], 120, 0.0),
        ("", [24], 24, 0.0),
        ("26 − 2", [26, 2], 24, 1.0),
        ("((((24))))", [24], 24, 1.0),
        ("(" * 900 + "24" + ")" * 900, [24], 24, 0.0),
        ("24 / (3 - 3)", [24, 3, 3], 24, 0.0),
    ],
)
def test_countdown(expression: str, numbers: list[int], target: int, accuracy: float) -> None:
    text = f"<think>w</think><answer>{expression}</answer>"
    item = RewardItem(
        "x", text, str(target), task="countdown", extra={"numbers": numbers, "target": target}
    )
    assert tasks.grade(item, {}).accuracy == accuracy
    stored = RewardItem(
        "x", text, json.dumps({"numbers": numbers, "target": target}), task="countdown"
    )
    assert tasks.grade(stored, {}).accuracy == accuracy


def test_countdown_without_numbers_is_ungradable() -> None:
    assert (
        tasks.grade(RewardItem("x", "<answer>1</answer>", "1", task="countdown"), {}).status
        == "ungradable"
    )


@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "simple_integration", "spiral_matrix", "word_sorting"]
)
def test_reasoning_gym_verifier_by_name_runs_no_code(name: str, tmp_path: Path) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
    mark = tmp_path / "mark"

    def score(answer: str) -> float:
        item = RewardItem(
            "x",
            f"<answer>{answer}</answer>",
            str(entry["answer"]),
            task="reasoning_gym",
            extra={"name": name, "entry": entry},
        )
        return tasks.grade(item, {}).accuracy

    assert score(str(entry["answer"])) == 1.0
    for code in (
        f"__import__('os').system('touch {mark}')",
        f"[open('{mark}','w')]",
        "9**9**9**9",
        "lambda: 1",
    ):
        assert score(code) < 0.5
    assert not mark.exists()


def test_an_unknown_task_is_an_error_that_names_the_known_ones() -> None:
    item = RewardItem("x", "<answer>5</answer>", "5", task="chess")
    result = score_safely(Scorer({"rules": {"accuracy": 1.0}}), item)
    assert result.status == "error" and "countdown" in result.reason


def test_adversarial_completions_in_process(tmp_path: Path) -> None:
    mark, scorer = tmp_path / "mark", Scorer({"rules": {"accuracy": 1.0, "format": 1.0}})
    for case in adversarial(600, seed=11, mark=str(mark)):
        result = score_safely(scorer, case.item)
        assert (result.status, result.parts.get("accuracy")) == ("ok", case.accuracy), (
            case.kind,
            ascii(result),
        )
        assert result.parts["accuracy"] or result.reason
    assert not mark.exists()


@pytest.mark.parametrize("text", [",", ";", "or"])
def test_a_separator_is_a_whole_token(text: str) -> None:
    assert reading.is_separator(Token("op", text))


@pytest.mark.parametrize("text", ["", "o", "r", ";o", ",;", ",;or"])
def test_a_part_of_the_list_of_separators_is_no_separator(text: str) -> None:
    assert not reading.is_separator(Token("op", text))


@pytest.mark.parametrize("text", ["", "¤€", "€£"])
def test_a_money_sign_is_one_sign(text: str) -> None:
    assert text not in MONEY
