"""Verifiers by task: mathematics, countdown, reasoning-gym's by name, and programs with tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from reward_service.math import grading
from reward_service.math.expression import Parser, evaluate
from reward_service.math.text import Unreadable, normalise, tokenise
from reward_service.rules.rules import Grade, RewardItem, answer_block

MAX_COUNTDOWN = 2000  # characters
_MISPLACED = re.compile(r"\d\s+\d|\d\s*\(|\)\s*[\d(]|(?:^|[+\-*/(])\s*(?:-\s*[(+\-]|\+)|\d{31}")


def grade(item: RewardItem, options: Mapping[str, Any]) -> Grade:
    """Verdict on the answer block by item.task. Raises ValueError for an unknown task."""
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
    """(value, numbers used) of an arithmetic expression; "= n" may follow it and must then hold. Never run as code.

    Raises Unreadable for anything but + - * / ( ), whole numbers, and a minus sign in front of a number.
    """
    expression, equals, result = normalise(text).partition("=")
    if len(expression) > MAX_COUNTDOWN or not re.fullmatch(r"[\d\s+\-*/()]+", expression):
        raise Unreadable("only + - * / ( ) and whole numbers are allowed, up to 2000 characters")
    if _MISPLACED.search(expression):
        raise Unreadable(
            "an operator is missing between numbers or parentheses, or a sign is not one of a number"
        )
    value = evaluate(Parser(tokenise(expression, lambda word: False)).whole())
    if equals and not (
        re.fullmatch(r"\s*-?\d{1,30}\s*", result) and Fraction(result.strip()) == value
    ):
        raise Unreadable("the stated result is not that of the expression")
    return value, [int(digits) for digits in re.findall(r"\d+", expression)]


def _countdown(block: str, item: RewardItem, options: Mapping[str, Any]) -> Grade:
    given = dict(item.extra)
    if item.gold.strip().startswith("{"):
        given = {**json.loads(item.gold), **given}
    numbers, target = given.get("numbers", given.get("nums")), given.get("target", item.gold)
    try:
        wanted, available = Fraction(str(target)), sorted(abs(int(n)) for n in numbers)
    except (TypeError, ValueError):
        return Grade(
            0.0,
            block.strip()[:500],
            f"countdown needs numbers and target, got {numbers!r} and {target!r}",
            "ungradable",
        )
    box = grading.last_box(block)
    found = grading.strip_lead(block if box is None else box)
    value, used = countdown_value(found)
    if sorted(used) != available:
        return Grade(0.0, found[:500], f"uses {sorted(used)}, given {available}")
    return Grade(float(value == wanted), found[:500], f"value {value}, target {wanted}"[:300])


# ---- reasoning-gym
_CALLS = {
    "sin",
    "cos",
    "tan",
    "log",
    "ln",
    "exp",
    "sqrt",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "Abs",
    "E",
}


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
    """Whether a text goes beyond arithmetic, lists of literals and known functions, or is too costly to evaluate."""
    calls = set(re.findall(r"([A-Za-z_]\w*)\s*\(", text)) - _CALLS
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
    """Score of reasoning-gym's own verifier. Several evaluate the answer as Python: these see only plain arithmetic."""
    name, entry = item.extra.get("name"), item.extra.get("entry")
    if not name or not isinstance(entry, Mapping):
        return Grade(
            0.0, block.strip()[:500], "reasoning_gym needs extra.name and extra.entry", "ungradable"
        )
    settings = {
        k: v for k, v in dict(item.extra.get("options") or {}).items() if k not in ("size", "seed")
    }
    verifier, evaluates = _gym_verifier(str(name), json.dumps(settings, sort_keys=True))
    found = block.strip()
    if evaluates and unsafe_to_evaluate(found):
        return Grade(
            0.0,
            found[:500],
            f"verifier {name} evaluates answers, and this one is not plain arithmetic",
        )
    score = float(verifier(found, dict(entry)))
    return Grade(score, found[:500], f"reasoning-gym {name}: {score:g}")


# ---- programs
def program_of(block: str) -> str:
    """The last fenced block if there is one, else the whole answer."""
    fenced = re.findall(
        r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", block, re.DOTALL | re.IGNORECASE
    )
    return (fenced[-1] if fenced else block).strip("\n") + "\n"


def _code(block: str, item: RewardItem, options: Mapping[str, Any]) -> Grade:
    """1.0 if the program passes every test of extra.tests or of the gold (JSON): [{stdin, stdout}] or [{code}]."""
    from reward_service.sandbox import programs

    tests = item.extra.get("tests")
    try:
        tests = (
            json.loads(item.gold)
            if tests is None
            else json.loads(tests)
            if isinstance(tests, str)
            else tests
        )
        tests = [{"code": test} if isinstance(test, str) else dict(test) for test in tests]
        if not tests or not all(("stdout" in test) != ("code" in test) for test in tests):
            raise ValueError("no test, or one without stdout or code")
    except (TypeError, ValueError) as error:
        return Grade(
            0.0,
            reason=f"code needs tests as a JSON list of {{stdin, stdout}} or {{code}}: {error}",
            status="ungradable",
        )
    program = program_of(block)
    verdicts = programs.run_tests(
        program, tests, programs.Limits(**dict(options.get("limits") or {}))
    )
    failed = next(
        (
            f"test {n}: {run.kind}: {run.detail}"
            for n, run in enumerate(verdicts, 1)
            if run.kind != "ok"
        ),
        "",
    )
    return Grade(0.0 if failed else 1.0, program[:500], failed or f"passed {len(tests)} tests")


TASKS: dict[str, Callable[[str, RewardItem, Mapping[str, Any]], Grade]] = {
    "math": lambda block, item, options: grading.grade_math(block, item.gold),
    "countdown": _countdown,
    "reasoning_gym": _gym,
    "code": _code,
}
