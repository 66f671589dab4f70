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
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:correct\s+|final\s+)?"
    r"(?:answer|option|choice)"
    r"(?:\s+is|\s*[:=])+\s*:?\s*",
    re.IGNORECASE,
)


def last_box(text: str) -> str | None:
    """Content of the last \\boxed{} or \\fbox{}, or None without one.

    Raises Unreadable if the last box is not closed.
    """
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
    """The answer within a reference answer as a data set stores it.

    GSM8K puts it after ####, MATH into the last box; in other data sets it is the whole text.
    """
    if "####" in gold:
        gold = gold.rpartition("####")[2]
    box = last_box(gold)
    return (gold if box is None else box).strip()


def text_key(text: str) -> str:
    """The text normalised for comparison as text.

    LaTeX wrappers, lead-ins and a final period are removed, and white space is unified. Letters
    become lower case, unless the text contains a digit: there the case can distinguish units or
    numerals.
    """
    if len(text) > MAX_ANSWER:
        return text
    text = WRAPPER.sub(r" \1 ", text)
    text = re.sub(r"\\[,;:! ]|\\[()\[\]]|[$\s]+", " ", text).strip(" \"'“”`*").rstrip(".。")
    text = " ".join(LEAD.sub("", text).split())
    return text if any(char.isdigit() for char in text) else text.casefold()


def strip_lead(text: str) -> str:
    """The text without surrounding white space, math delimiters and a lead-in ("The answer is")."""
    return LEAD.sub("", text.strip().strip("$").strip()).strip()
