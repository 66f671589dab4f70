"""Does the final answer equal the gold? Pure; nothing a model writes is ever executed."""

from __future__ import annotations

import re
from fractions import Fraction

from reward_service.rules import Grade, RewardItem, answer_block

_NUMBER = re.compile(r"[+-]?\d{1,4000}(\.\d{1,4000})?")


def _plain(text: str) -> str:
    text = text.strip().strip("$").strip()
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).rstrip(".")


def grade(item: RewardItem) -> Grade:
    """Verdict on the answer block of item.response against item.gold."""
    block = answer_block(item.response)
    gold = _plain(item.gold.rpartition("####")[2])
    if not gold:
        return Grade(0.0, status="ungradable", reason="gold answer is empty")
    if block is None:
        return Grade(0.0, reason="no finished answer block after the reasoning")
    found = _plain(block)
    if _NUMBER.fullmatch(found) and _NUMBER.fullmatch(gold):
        same = Fraction(found) == Fraction(gold)
    else:
        same = found.casefold() == gold.casefold()
    return Grade(float(same), block.strip(), f"read {found[:200]!r} against {gold[:200]!r}")
