"""Reward rules: small pure functions of one finished response, and how they add up to one reward.

A rule maps a `RewardItem` to a float. Only `accuracy` can say that it could not judge (status "ungradable").
No rule turns a failure into a zero: what cannot be scored has a status other than "ok" and a total of NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STATUSES = ("ok", "error", "timeout", "ungradable")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAG = re.compile("|".join(TAGS))


@dataclass(frozen=True)
class RewardItem:
    """One response to score. `response` is prefill + completion text; lengths are in tokens.

    Example: RewardItem(id="7/0", response="<think>3+4</think><answer>7</answer>", gold="7")
    """

    id: str
    response: str
    gold: str
    prompt: str = ""
    task: str = "math"
    data_source: str = ""
    completion_tokens: int = 0
    max_tokens: int = 0
    truncated: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """`total` is NaN unless status is "ok"; `parts` holds the unweighted value of every rule that could be computed."""

    id: str
    status: str
    total: float
    parts: dict[str, float]
    extracted: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Grade:
    """Verdict on a final answer: what was extracted, how it was read, and why it was judged so."""

    accuracy: float
    extracted: str = ""
    reason: str = ""
    status: str = "ok"


def format_reward(text: str) -> float:
    """1.0 if the tags are exactly <think></think><answer></answer>, one each, with only whitespace outside; else 0.0.

    Source: DeepSeek-R1 (arXiv:2501.12948), section 2.2.2, made exact.
    """
    found = list(_TAG.finditer(text))
    if tuple(match.group() for match in found) != TAGS:
        return 0.0
    outside = text[: found[0].start()], text[found[1].end() : found[2].start()], text[found[3].end() :]
    return 0.0 if any(part.strip() for part in outside) else 1.0


def answer_block(text: str) -> str | None:
    """Content of the last finished <answer> block outside the reasoning, or None. Linear in len(text).

    A </think> that nothing opened closes a reasoning that began with the text. A block stands in the reasoning if a
    <think> before it is still open and either was the last think tag or is closed later.
    """
    tags = [(match.group(), match.start(), match.end()) for match in _TAG.finditer(text)]
    think = [name for name, _, _ in tags if name in TAGS[:2]]
    depth = 1 if think and think[0] == "</think>" else 0
    closes_left = think.count("</think>")
    last_think, opened, best = "", None, None
    for name, start, end in tags:
        if name in ("<think>", "</think>"):
            depth = depth + 1 if name == "<think>" else max(0, depth - 1)
            closes_left -= name == "</think>"
            last_think, opened = name, None
        elif name == "<answer>":
            opened = end
        elif opened is not None:
            if depth == 0 or (last_think == "</think>" and closes_left == 0):
                best = text[opened:start]
            opened = None
    return best


# ---- the reward of one item -------------------------------------------------------------------------------------


Rule = Callable[[RewardItem, Mapping[str, Any], Mapping[str, float]], "float | Grade"]


def accuracy_rule(item: RewardItem, options: Mapping[str, Any], parts: Mapping[str, float]) -> Grade:
    """Verdict of the item's task: 1.0 right, 0.0 wrong."""
    from reward_service import tasks  # here, since tasks builds on this module

    return tasks.grade(item, options)


RULES: dict[str, Rule] = {
    "accuracy": accuracy_rule,
    "format": lambda item, options, parts: format_reward(item.response),
}


def combine(parts: Mapping[str, float], weights: Mapping[str, float], how: str) -> float:
    """"sum": sum of weight x part. "product": product of the parts, scaled by the product of the weights."""
    terms = [weights[name] * parts[name] for name in weights if weights[name] != 0.0]
    return math.fsum(terms) if how == "sum" else math.prod(terms)


class Scorer:
    """Scores items by the rules of a reward config (a mapping with rules, combine, options)."""

    def __init__(self, cfg: Mapping[str, Any]):
        self.how = str(cfg.get("combine", "sum"))
        self.options = dict(cfg.get("options") or {})
        self.weights = {str(k): float(v) for k, v in dict(cfg.get("rules") or {}).items()}
        self.rules: dict[str, Rule] = dict(RULES)
        if self.how not in ("sum", "product"):
            raise ValueError(f"reward.combine={self.how!r}: expected 'sum' or 'product'")
        if not self.weights:
            raise ValueError("reward.rules is empty: name at least one rule with its weight, such as {accuracy: 1.0}")
        for name in self.weights:
            if name not in self.rules:
                raise ValueError(f"reward.rules: unknown rule {name!r}; known: {', '.join(sorted(self.rules))}")

    def __call__(self, item: RewardItem) -> RewardResult:
        """Scores one item; an exception of a rule becomes status "error" with its text."""
        parts: dict[str, float] = {}
        status, extracted, reasons = "ok", "", []
        for name, weight in self.weights.items():
            value = self.rules[name](item, self.options.get(name) or {}, parts)
            if isinstance(value, Grade):
                extracted, reasons = value.extracted, [*reasons, value.reason]
                if value.status != "ok" and weight != 0.0:
                    status = value.status
                value = value.accuracy
            if not math.isfinite(value):
                raise ValueError(f"rule {name!r} returned {value!r}; expected a finite number")
            parts[name] = float(value)
        total = combine(parts, self.weights, self.how) if status == "ok" else math.nan
        return RewardResult(item.id, status, total, parts, extracted, "; ".join(filter(None, reasons)))


def score_safely(scorer: Callable[[RewardItem], RewardResult], item: RewardItem) -> RewardResult:
    """scorer(item), with any exception turned into status "error" and its text."""
    try:
        return scorer(item)
    except (Exception, SystemExit) as error:
        return RewardResult(item.id, "error", math.nan, {}, "", f"{type(error).__name__}: {error}"[:500])
