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
    """Verdict on `answer`, the content of the answer block, for a stored reference answer `gold`.

    The checks in their order: an option letter, identical text, a reference beyond the grammar
    (math-verify), a reference of words, and the comparison of two values. Raises Unreadable if the
    last box of a text is not closed.
    """
    reference = gold_text(gold)
    if not reference:
        return Grade(0.0, status="ungradable", reason="the gold answer is empty")
    box = last_box(answer)
    stated = (answer if box is None else box).strip()
    extracted = stated[:500]
    if not stated:
        return Grade(0.0, extracted, "the answer is blank")
    target = read_gold(gold)
    letter = choice_letter(reference, gold=True)
    if letter and len(stated) <= 2000:
        chosen = choice_letter(stated)
        if chosen:
            return Grade(
                float(chosen == letter), extracted, f"read as choice {chosen}, gold {letter}"
            )
    if text_key(stated) and text_key(stated) == target.key:
        return Grade(1.0, extracted, "the same text as the gold")
    if _BEYOND.search(reference):
        return _grade_by_library(stated, reference)
    if target.value is None:
        return _grade_words(stated, target, reference)
    reading = read(stated)
    if reading.value is None:
        return Grade(0.0, extracted, f"not read as one value: {reading.problem}")
    if letter and reading.words:
        return Grade(0.0, extracted, "words that name no choice")
    same, why = compare(target, reading)
    return Grade(float(same), extracted, f"{why}; read as {reading.tokens_text}")


def _grade_words(stated: str, target: Reading, reference: str) -> Grade:
    """Verdict for a reference answer that is not a value: the same words are right, in any order.

    If the reference looks like mathematics, other answers are "ungradable" instead of wrong.
    """
    split = re.compile(r"\s*(?:,|;|\band\b)\s*")
    gold_items = sorted(filter(None, split.split(target.key)))
    if len(gold_items) > 1 and gold_items == sorted(filter(None, split.split(text_key(stated)))):
        return Grade(1.0, stated[:500], "the same words as the gold, as a list")
    if re.search(r"[\\^_{}=<>]|\d", re.sub(WRAPPER, r"\1", reference)):
        return Grade(0.0, stated[:500], f"the gold cannot be read: {target.problem}", "ungradable")
    return Grade(0.0, stated[:500], "not the same words as the gold")


def _grade_by_library(stated: str, reference: str) -> Grade:
    """Verdict for a reference answer with an integral, a sum, a product or a limit.

    math-verify parses both sides, and sympy simplifies their difference. Texts over 500 characters
    are not evaluated.
    """
    if len(stated) > 500 or len(reference) > 500:
        return Grade(0.0, stated[:500], "too long to evaluate")
    import logging

    import sympy
    from math_verify import LatexExtractionConfig, parse

    # math-verify warns that its alarm is off. The worker process has its own deadline.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = [LatexExtractionConfig()]
    sides = [
        parse(f"${text.strip('$ ')}$", config, fallback_mode="no_fallback", parsing_timeout=0)
        for text in (reference, stated)
    ]
    if not sides[0] or not isinstance(sides[0][0], sympy.Expr):
        return Grade(0.0, stated[:500], "the gold cannot be read", "ungradable")
    if not sides[1] or not isinstance(sides[1][0], sympy.Expr):
        return Grade(0.0, stated[:500], "not read as one value by math-verify")
    same = sympy.simplify(sides[0][0].doit() - sides[1][0].doit()) == 0
    return Grade(float(same), stated[:500], f"read by math-verify as {str(sides[1][0])[:150]}")
