"""Verifiers of final answers by task: math, countdown, reasoning_gym, and code with tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from reward_service.math import grading
from reward_service.math.evaluation import evaluate
from reward_service.math.extraction import last_box, strip_lead
from reward_service.math.grade import Grade
from reward_service.math.parser import Parser
from reward_service.math.text import Unreadable, normalise, tokenise
from reward_service.rules.format import answer_block
from reward_service.rules.item import RewardItem
from reward_service.sandbox import programs

MAX_COUNTDOWN = 2000  # characters
_MISPLACED = re.compile(r"\d\s+\d|\d\s*\(|\)\s*[\d(]|(?:^|[+\-*/(])\s*(?:-\s*[(+\-]|\+)|\d{31}")


def grade(item: RewardItem, options: Mapping[str, Any]) -> Grade:
    """Verdict of the verifier of item.task on the answer block of the response.

    Raises ValueError for a task without a verifier.
    """
    if item.task not in TASKS:
        raise ValueError(f"task {item.task!r} has no verifier; known: {', '.join(TASKS)}")
    block = answer_block(item.response)
    if block is None:
        return Grade(0.0, reason="no finished answer block after the reasoning")
    try:
        return TASKS[item.task](block, item, options)
    except Unreadable as error:
        return Grade(0.0, block.strip()[:500], f"not read as one value: {error}")
    except RecursionError:
        return Grade(0.0, block.strip()[:500], "too deeply nested to evaluate")


# ---- countdown
def countdown_value(text: str) -> tuple[Fraction, list[int]]:
    """(value, numbers used) of an arithmetic expression, which is parsed and never run as code.

    The expression may be followed by "= n", which must then be its value. Raises Unreadable for
    anything but + - * / ( ), whole numbers, and a minus sign in front of a number.
    """
    expression, equals, result = normalise(text).partition("=")
    if len(expression) > MAX_COUNTDOWN or not re.fullmatch(r"[\d\s+\-*/()]+", expression):
        raise Unreadable("only + - * / ( ) and whole numbers are allowed, up to 2000 characters")
    if _MISPLACED.search(expression):
        raise Unreadable(
            "an operator is missing between numbers or parentheses, "
            "or a sign is not one of a number"
        )
    value = evaluate(Parser(tokenise(expression, lambda word: False)).whole())
    if equals and not (
        re.fullmatch(r"\s*-?\d{1,30}\s*", result) and Fraction(result.strip()) == value
    ):
        raise Unreadable("the stated result is not that of the expression")
    return value, [int(digits) for digits in re.findall(r"\d+", expression)]


def _countdown(block: str, item: RewardItem, options: Mapping[str, Any]) -> Grade:
    """1.0 if the expression uses every given number exactly once and its value is the target.

    `numbers` and `target` are read from item.extra or from the gold, a JSON object.
    """
    puzzle = dict(item.extra)
    if item.gold.strip().startswith("{"):
        puzzle = {**json.loads(item.gold), **puzzle}
    numbers = puzzle.get("numbers", puzzle.get("nums"))
    target = puzzle.get("target", item.gold)
    try:
        target_value = Fraction(str(target))
        available = sorted(abs(int(n)) for n in numbers)
    except (TypeError, ValueError):
        reason = f"countdown needs numbers and target, got {numbers!r} and {target!r}"
        return Grade(0.0, block.strip()[:500], reason, "ungradable")
    box = last_box(block)
    answer = strip_lead(block if box is None else box)
    value, used = countdown_value(answer)
    if sorted(used) != available:
        return Grade(0.0, answer[:500], f"uses {sorted(used)}, given {available}")
    reason = f"value {value}, target {target_value}"[:300]
    return Grade(float(value == target_value), answer[:500], reason)


# ---- reasoning-gym
_ALLOWED_CALLS = set("sin cos tan log ln exp sqrt asin acos atan sinh cosh tanh Abs E".split())


@lru_cache(maxsize=64)
def _gym_verifier(name: str, options: str) -> tuple[Callable[[str, dict], float], bool]:
    """(verifier, whether its module evaluates the answer as code) of a reasoning-gym data set."""
    import inspect
    import sys

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no data set {name!r}")
    verifier = reasoning_gym.create_dataset(
        name, **{"size": 1, "seed": 0, **json.loads(options)}
    ).score_answer
    source = inspect.getsource(sys.modules[DATASETS[name][0].__module__])
    return verifier, bool(re.search(r"\b(eval|exec|parse_expr|sympify)\(", source))


def unsafe_to_evaluate(text: str) -> bool:
    """Whether a text must not reach a verifier that evaluates it as Python.

    Allowed are arithmetic, lists of literals and known functions whose evaluation costs little.
    """
    calls = set(re.findall(r"([A-Za-z_]\w*)\s*\(", text)) - _ALLOWED_CALLS
    return bool(
        len(text) > 4000
        or calls
        or "__" in text
        or re.search(r"[^\w\s+\-*/^().,\[\]'\"=]", text)
        or re.search(r"\.\s*[A-Za-z_]|\b(?:lambda|for|if|import|while|not|in)\b", text)
        or re.search(r"[\])'\"]\s*[(\[]", text)
        and not re.fullmatch(r"[\s\d+\-*/().]*", text)
        or re.search(
            r"(?:\*\*|\^)[\s(+\-]*[\w.]+[\s)]*(?:\*\*|\^)|(?:\*\*|\^)\s*\([^()]*(?:\*\*|\^)", text
        )
        or re.search(r"(?:\*\*|\^)\W*\d{4,}|\d{400,}", text)
    )


def _gym(block: str, item: RewardItem, options: Mapping[str, Any]) -> Grade:
    """Score of the verifier that reasoning-gym ships with the data set.

    Several of these verifiers evaluate the answer as Python. They receive only plain arithmetic and
    lists of literals; any other answer scores 0.
    """
    name, entry = item.extra.get("name"), item.extra.get("entry")
    if not name or not isinstance(entry, Mapping):
        reason = "reasoning_gym needs extra.name and extra.entry"
        return Grade(0.0, block.strip()[:500], reason, "ungradable")
    settings = {
        k: v for k, v in dict(item.extra.get("options") or {}).items() if k not in ("size", "seed")
    }
    verifier, evaluates = _gym_verifier(str(name), json.dumps(settings, sort_keys=True))
    answer = block.strip()
    if evaluates and unsafe_to_evaluate(answer):
        reason = f"verifier {name} evaluates answers, and this one is not plain arithmetic"
        return Grade(0.0, answer[:500], reason)
    score = float(verifier(answer, dict(entry)))
    return Grade(score, answer[:500], f"reasoning-gym {name}: {score:g}")


# ---- programs
def program_of(block: str) -> str:
    """The program in an answer block: its last fenced code, or the whole block without any."""
    fenced = re.findall(
        r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", block, re.DOTALL | re.IGNORECASE
    )
    return (fenced[-1] if fenced else block).strip("\n") + "\n"


def _tests_of(item: RewardItem) -> list[dict[str, Any]]:
    """The tests of extra.tests or of the gold. Raises ValueError or TypeError if there are none."""
    tests = item.extra.get("tests", None)
    if tests is None:
        tests = json.loads(item.gold)
    elif isinstance(tests, str):
        tests = json.loads(tests)
    tests = [{"code": test} if isinstance(test, str) else dict(test) for test in tests]
    if not tests or not all(("stdout" in test) != ("code" in test) for test in tests):
        raise ValueError("no test, or one without stdout or code")
    return tests


def _code(block: str, item: RewardItem, options: Mapping[str, Any]) -> Grade:
    """1.0 if the program passes every test, a JSON list of {stdin, stdout} or {code}."""
    try:
        tests = _tests_of(item)
    except (TypeError, ValueError) as error:
        reason = f"code needs tests as a JSON list of {{stdin, stdout}} or {{code}}: {error}"
        return Grade(0.0, reason=reason, status="ungradable")
    program = program_of(block)
    limits = programs.Limits(**dict(options.get("limits") or {}))
    for number, run in enumerate(programs.run_tests(program, tests, limits), 1):
        if run.kind != "ok":
            return Grade(0.0, program[:500], f"test {number}: {run.kind}: {run.detail}")
    return Grade(1.0, program[:500], f"passed {len(tests)} tests")


TASKS: dict[str, Callable[[str, RewardItem, Mapping[str, Any]], Grade]] = {
    "math": lambda block, item, options: grading.grade_math(block, item.gold),
    "countdown": _countdown,
    "reasoning_gym": _gym,
    "code": _code,
}
