"""Extraction of the final answer from text: boxes, stored reference answers, and lead-ins."""

from __future__ import annotations

import re

from reward_service.math.text import Unreadable, closing_brace

MAX_ANSWER = 20_000  # characters; a longer answer is compared as text only
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{\\]))")
WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathsf|boldsymbol)\s*\{([^{}]*)\}"
)
LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:correct\s+|final\s+)?(?:answer|option|choice)"
    r"(?:\s+is|\s*[:=])+\s*:?\s*",
    re.IGNORECASE,
)


def last_box(text: str) -> str | None:
    """Content of the last \\boxed{} or \\fbox{}, or None. Raises Unreadable if it is not closed."""
    matches = list(_BOX.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    if not match.group(1):
        return text[match.end()]
    end = closing_brace(text, match.end())
    if end < 0:
        raise Unreadable("the last box is never closed")
    return text[match.end() : end]


def gold_text(gold: str) -> str:
    """The answer of a gold as a dataset stores it: after GSM8K's ####, in MATH's last box, or all of it."""
    if "####" in gold:
        gold = gold.rpartition("####")[2]
    box = last_box(gold)
    return (gold if box is None else box).strip()


def text_key(text: str) -> str:
    """Words for comparison as text: no LaTeX wrappers, one kind of space, no final period; case only where digits are.

    Upper and lower case differ beside digits, where they may be units or numerals.
    """
    if len(text) > MAX_ANSWER:
        return text
    text = WRAPPER.sub(r" \1 ", text)
    text = re.sub(r"\\[,;:! ]|\\[()\[\]]|[$\s]+", " ", text).strip(" \"'“”`*").rstrip(".。")
    text = " ".join(LEAD.sub("", text).split())
    return text if any(char.isdigit() for char in text) else text.casefold()


def strip_lead(text: str) -> str:
    """Without white space, math delimiters and a lead such as "The answer is"."""
    return LEAD.sub("", text.strip().strip("$").strip()).strip()
