"""Reward rules: small pure functions of one finished response, and how they add up to one reward.

A rule maps a `RewardItem` to a float. Only `accuracy` can say that it could not judge (status "ungradable").
No rule turns a failure into a zero: what cannot be scored has a status other than "ok" and a total of NaN.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """Verdict on a final answer: what was extracted, how it was read, and why. `accuracy` counts if status is "ok"."""

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
    outside = (
        text[: found[0].start()],
        text[found[1].end() : found[2].start()],
        text[found[3].end() :],
    )
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


def reasoning_of(text: str) -> str:
    """The text from the first <think> to the last </think>; a missing end stands for the end of the text."""
    start, end = text.find("<think>"), text.rfind("</think>")
    return text[start + 7 if start >= 0 else 0 : end if end > start else len(text)]


def tag_count_reward(text: str) -> float:
    """A quarter for each of the four tags that stands exactly once."""
    counts = Counter(match.group() for match in _TAG.finditer(text))
    return sum(counts[tag] == 1 for tag in TAGS) / len(TAGS)


_WORD = re.compile(
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\u4e00-\u9fff\u3400-\u4dbf]|[\u3040-\u30ff]+|[^\W\d_]+"
)
_SCRIPTS = {
    "ko": re.compile(r"[\uac00-\ud7a3\u3131-\u318e]"),
    "zh": re.compile(r"[\u4e00-\u9fff\u3400-\u4dbf]"),
    "ja": re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]"),
    "en": re.compile(r"[A-Za-z]"),
}


def language_reward(text: str, target: str) -> float:
    """Share of the words of the reasoning that are written in the script of `target` (en, ko, zh, ja), in [0, 1].

    A Han character counts as a word. LaTeX commands, tags and single Latin letters (variables) do not count. Reasoning
    without any word is consistent (1.0) unless it is blank (0.0). Script, not language: en is any Latin-script text.
    Source: DeepSeek-R1 (arXiv:2501.12948), section 2.3.2.
    """
    if target not in _SCRIPTS:
        raise ValueError(
            f"reward.options.language.target={target!r}: expected one of {', '.join(_SCRIPTS)}"
        )
    reasoning = re.sub(r"</?(?:think|answer)>|\\[A-Za-z]+", " ", reasoning_of(text))
    words = [word for word in _WORD.findall(reasoning) if len(word) > 1 or not word.isascii()]
    if not words:
        return float(bool(reasoning.strip()))
    return sum(bool(_SCRIPTS[target].match(word)) for word in words) / len(words)


def cosine_length_reward(
    tokens: int,
    max_tokens: int,
    right: bool,
    correct: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-1.0, -0.5),
    exceeded: float = -1.0,
) -> float:
    """Cosine schedule over the length in tokens: from the first value at length 0 to the second at max_tokens.

    end + (start - end) (1 + cos(pi tokens / max_tokens)) / 2; `exceeded` at or beyond max_tokens. With the defaults a
    right answer is better short and a wrong one better long. Source: the cosine reward of arXiv:2502.03373.
    """
    if tokens >= max_tokens:
        return exceeded
    start, end = correct if right else wrong
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * max(tokens, 0) / max_tokens))


def soft_overlong_reward(tokens: int, max_tokens: int, cache: int) -> float:
    """0 up to max_tokens - cache, then falling linearly to -1 at max_tokens, and -1 beyond. In tokens.

    Source: DAPO (arXiv:2503.14476), equation 13.
    """
    if not 0 < cache <= max_tokens:
        raise ValueError(
            f"reward.options.soft_overlong.cache={cache}: expected 1 to max_tokens={max_tokens}"
        )
    return min(0.0, max(-1.0, (max_tokens - cache - tokens) / cache))


def repetition_reward(text: str, n: int = 4) -> float:
    """-(1 - distinct / all) of the n-grams of words of the whole response, in (-1, 0]; 0 for fewer than n words.

    Source: the n-gram repetition penalty of arXiv:2502.03373, as a share instead of a per-token cost.
    """
    words = re.findall(r"[\u4e00-\u9fff]|[^\W_]+|[^\w\s]", text.casefold())
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


_STEP = re.compile(
    r"(?im)^\s*(?:step\s*\d+|\d+[.)]\s|[-*]\s|第[一二三四五六七八九十\d]+步)|\b(?:first|second|third|next|then|finally)\b,"
    r"|(?:首先|其次|然后|最后|먼저|다음으로|마지막으로)"
)


def reasoning_steps_reward(text: str, wanted: int = 3) -> float:
    """Marked steps in the reasoning (numbered lines, bullets, "First,"), as a share of `wanted`, at most 1."""
    return min(1.0, sum(1 for _ in _STEP.finditer(reasoning_of(text))) / wanted)


# ---- the reward of one item
Rule = Callable[[RewardItem, Mapping[str, Any], dict[str, float]], "float | Grade | None"]


def accuracy_rule(item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]) -> Grade:
    """Verdict of the item's task: 1.0 right, 0.0 wrong."""
    from reward_service.rules import tasks

    return tasks.grade(item, options)


def _max_tokens(item: RewardItem, options: Mapping[str, Any]) -> int:
    limit = int(options.get("max_tokens", item.max_tokens))
    if limit <= 0:
        raise ValueError("length rules need the completion budget: set reward.options.max_tokens")
    return limit


def _cosine(item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]) -> float | None:
    if "accuracy" not in parts:
        return None  # not determined; Scorer refuses settings without the rule accuracy
    shape = {key: options[key] for key in ("correct", "wrong", "exceeded") if key in options}
    return cosine_length_reward(
        item.completion_tokens, _max_tokens(item, options), parts["accuracy"] == 1.0, **shape
    )


def _overlong(item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]) -> float:
    limit = _max_tokens(item, options)
    return soft_overlong_reward(
        item.completion_tokens, limit, int(options.get("cache", max(1, limit // 5)))
    )


RULES: dict[str, Rule] = {
    "accuracy": accuracy_rule,
    "format": lambda item, options, parts: format_reward(item.response),
    "tag_count": lambda item, options, parts: tag_count_reward(item.response),
    "language": lambda item, options, parts: language_reward(
        item.response, str(options.get("target", "en"))
    ),
    "cosine_length": _cosine,
    "soft_overlong": _overlong,
    "repetition": lambda item, options, parts: repetition_reward(
        item.response, int(options.get("n", 4))
    ),
    "reasoning_steps": lambda item, options, parts: reasoning_steps_reward(
        item.response, int(options.get("steps", 3))
    ),
}


def combine(parts: Mapping[str, float], weights: Mapping[str, float], how: str) -> float:
    """ "sum": sum of weight x part. "product": product of weight x part. Rules of weight 0 are only measured."""
    terms = [
        weights[name] * parts[name] for name in weights if weights[name] != 0.0 and name in parts
    ]
    return math.fsum(terms) if how == "sum" else math.prod(terms)


class Scorer:
    """Scores items by a reward config: rules {name: weight}, combine (sum, product), options {rule: its settings}.

    options.by_source: {data_source: {rule: weight}} replaces the weights for items of that data source.
    options.custom: {rule: {style, path, ...}} adds the user's own functions (reward_service.rules.users).
    Raises ValueError naming the setting for anything it does not know.
    """

    def __init__(self, cfg: Mapping[str, Any]):
        self.how, self.options = str(cfg.get("combine", "sum")), dict(cfg.get("options") or {})
        self.rules: dict[str, Rule] = dict(RULES)
        if self.options.get("custom"):
            from reward_service.rules.users import load_rules

            self.rules.update(load_rules(self.options["custom"], float(cfg.get("timeout_s", 10.0))))
        self.weights = self._weights("reward.rules", cfg.get("rules"))
        self.by_source = {
            str(source): self._weights(f"reward.options.by_source.{source}", rules)
            for source, rules in dict(self.options.get("by_source") or {}).items()
        }
        known = {
            *self.rules,
            "by_source",
            "custom",
            "max_tokens",
            "max_pending",
            "worker_memory_gib",
        }
        unknown = sorted(set(self.options) - known)
        if unknown:
            raise ValueError(
                f"reward.options.{unknown[0]}: unknown; known: {', '.join(sorted(known))}"
            )
        if self.how not in ("sum", "product"):
            raise ValueError(f"reward.combine={self.how!r}: expected 'sum' or 'product'")

    def _weights(self, setting: str, rules: Mapping[str, Any] | None) -> dict[str, float]:
        weights = {
            str(name): float(weight)
            for name, weight in dict(rules or {}).items()
            if weight is not None
        }
        if not weights:
            raise ValueError(
                f"{setting} is empty: name at least one rule with its weight, such as {{accuracy: 1.0}}"
            )
        for name, weight in weights.items():
            if name not in self.rules or not math.isfinite(weight):
                raise ValueError(
                    f"{setting}.{name}={weight}: unknown rule or no finite weight; "
                    f"known rules: {', '.join(sorted(self.rules))}"
                )
        if "cosine_length" in weights and "accuracy" not in weights:
            raise ValueError(
                f"{setting}.cosine_length needs the rule accuracy beside it (its weight may be 0)"
            )
        return dict(
            sorted(weights.items(), key=lambda pair: pair[0] != "accuracy")
        )  # others may need its verdict

    def __call__(self, item: RewardItem) -> RewardResult:
        """Scores one item. An exception of a rule is the caller's to turn into status "error" (score_safely)."""
        weights = self.by_source.get(item.data_source, self.weights)
        parts: dict[str, float] = {}
        status, extracted, reasons = "ok", "", []
        for name, weight in weights.items():
            options = dict(self.options.get(name) or {})
            if "max_tokens" in self.options:
                options.setdefault("max_tokens", self.options["max_tokens"])
            value = self.rules[name](item, options, parts)
            if isinstance(value, Grade):
                extracted, reasons = value.extracted, [*reasons, value.reason]
                if value.status != "ok" and (weight or weights.get("cosine_length")):
                    status = value.status
                value = value.accuracy if value.status == "ok" else None
            elif value is None:
                reasons.append(f"rule {name} does not apply")
            if value is None:  # no part: a number would be read as a verdict
                continue
            if not math.isfinite(value):
                raise ValueError(f"rule {name!r} returned {value!r}; expected a finite number")
            parts[name] = float(value)
        counted = [
            name for name, weight in weights.items() if weight != 0.0
        ]  # none where reward models alone count
        if status == "ok" and counted and not any(name in parts for name in counted):
            status = "ungradable"
        total = combine(parts, weights, self.how) if status == "ok" else math.nan
        return RewardResult(
            item.id, status, total, parts, extracted, "; ".join(filter(None, reasons))
        )


def score_safely(scorer: Callable[[RewardItem], RewardResult], item: RewardItem) -> RewardResult:
    """scorer(item), with any exception turned into status "error" and its text."""
    try:
        return scorer(item)
    except (Exception, SystemExit) as error:
        return RewardResult(
            item.id, "error", math.nan, {}, "", f"{type(error).__name__}: {error}"[:500]
        )
