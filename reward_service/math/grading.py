"""Does the final answer equal the reference answer? The policy is described in docs/rewards.md.

The answer must be readable as a whole by the grammar of this folder, or it is no value: a part of
an answer can never match alone. Comparison is exact. math-verify reads what the grammar does not
know and a reference answer may contain (integrals, sums, limits). Sizes are bounded before anything
is computed, and the hard deadline of the worker process stands behind these bounds. Nothing that a
model wrote is ever executed.
"""

from __future__ import annotations

import re

from reward_service.math.choices import choice_letter
from reward_service.math.comparison import compare
from reward_service.math.extraction import WRAPPER, gold_text, last_box, text_key
from reward_service.math.grade import Grade
from reward_service.math.reading import Reading, read, read_gold

_BEYOND = re.compile(r"\\(?:int|sum|prod|lim|iint|oint|partial|nabla)(?![A-Za-z])")


def grade_math(answer: str, gold: str) -> Grade:
    """Verdict on an answer (the content of the answer block) against a gold as the dataset stores it."""
    wanted = gold_text(gold)
    if not wanted:
        return Grade(0.0, status="ungradable", reason="the gold answer is empty")
    box = last_box(answer)
    found = (answer if box is None else box).strip()
    shown = found[:500]
    if not found:
        return Grade(0.0, shown, "the answer is blank")
    target = read_gold(gold)
    letter = choice_letter(wanted, gold=True)
    if letter and len(found) <= 2000:
        chosen = choice_letter(found)
        if chosen:
            return Grade(float(chosen == letter), shown, f"read as choice {chosen}, gold {letter}")
    if text_key(found) and text_key(found) == target.key:
        return Grade(1.0, shown, "the same text as the gold")
    if _BEYOND.search(wanted):
        return _grade_by_library(found, wanted)
    if target.value is None:
        return _grade_words(found, target, wanted)
    reading = read(found)
    if reading.value is None:
        return Grade(0.0, shown, f"not read as one value: {reading.problem}")
    if letter and reading.words:
        return Grade(0.0, shown, "words that name no choice")
    same, why = compare(target, reading)
    return Grade(float(same), shown, f"{why}; read as {reading.shown}")


def _grade_words(found: str, target: Reading, wanted: str) -> Grade:
    """A gold that is no value: the same words match. One that looks like mathematics cannot be judged otherwise."""
    split = re.compile(r"\s*(?:,|;|\band\b)\s*")
    gold_items = sorted(filter(None, split.split(target.key)))
    if len(gold_items) > 1 and gold_items == sorted(filter(None, split.split(text_key(found)))):
        return Grade(1.0, found[:500], "the same words as the gold, as a list")
    if re.search(r"[\\^_{}=<>]|\d", re.sub(WRAPPER, r"\1", wanted)):
        return Grade(0.0, found[:500], f"the gold cannot be read: {target.problem}", "ungradable")
    return Grade(0.0, found[:500], "not the same words as the gold")


def _grade_by_library(found: str, wanted: str) -> Grade:
    """Integrals, sums and limits in a gold: math-verify's parser on both, sympy's difference; both sides short."""
    if len(found) > 500 or len(wanted) > 500:
        return Grade(0.0, found[:500], "too long to evaluate")
    import logging

    import sympy
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its alarm is off: ours is the worker's
    config = [LatexExtractionConfig()]
    sides = [
        parse(f"${text.strip('$ ')}$", config, fallback_mode="no_fallback", parsing_timeout=0)
        for text in (wanted, found)
    ]
    if not sides[0] or not isinstance(sides[0][0], sympy.Expr):
        return Grade(0.0, found[:500], "the gold cannot be read", "ungradable")
    if not sides[1] or not isinstance(sides[1][0], sympy.Expr):
        return Grade(0.0, found[:500], "not read as one value by math-verify")
    same = sympy.simplify(sides[0][0].doit() - sides[1][0].doit()) == 0
    return Grade(float(same), found[:500], f"read by math-verify as {str(sides[1][0])[:150]}")
