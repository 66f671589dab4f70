"""Combines the rules of a reward config into the reward of one item."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from reward_service.math.grade import Grade
from reward_service.rules.item import RewardItem, RewardResult, Rule
from reward_service.rules.registry import RULES
from reward_service.rules.users import load_rules

# Keys of reward.options that are not the name of a rule.
_GENERAL_OPTIONS = {"by_source", "custom", "max_tokens", "max_pending", "worker_memory_gib"}


def combine(parts: Mapping[str, float], weights: Mapping[str, float], method: str) -> float:
    """The sum (`method` "sum") or product ("product") of weight x part over the rules with a part.

    Rules of weight 0 are measured only and do not enter the reward.
    """
    terms = [
        weights[name] * parts[name] for name in weights if weights[name] != 0.0 and name in parts
    ]
    return math.fsum(terms) if method == "sum" else math.prod(terms)


class Scorer:
    """Scores items by a reward config: a mapping with rules, combine, options and timeout_s.

    rules: {name: weight}. combine: "sum" or "product". options: {rule: its settings}, with
    options.by_source: {data_source: {rule: weight}}, the weights for items of that data source, and
    options.custom: {rule: {style, path, ...}}, the user's own functions (rules/users.py).
    Raises ValueError naming the setting for anything it does not know.
    """

    def __init__(self, cfg: Mapping[str, Any]):
        self.method = str(cfg.get("combine", "sum"))
        self.options = dict(cfg.get("options") or {})
        self.rules: dict[str, Rule] = dict(RULES)
        if self.options.get("custom"):
            self.rules.update(load_rules(self.options["custom"], float(cfg.get("timeout_s", 10.0))))
        self.weights = self._weights("reward.rules", cfg.get("rules"))
        self.by_source = {
            str(source): self._weights(f"reward.options.by_source.{source}", rules)
            for source, rules in dict(self.options.get("by_source") or {}).items()
        }
        known = {*self.rules, *_GENERAL_OPTIONS}
        unknown = sorted(set(self.options) - known)
        if unknown:
            raise ValueError(
                f"reward.options.{unknown[0]}: unknown; known: {', '.join(sorted(known))}"
            )
        if self.method not in ("sum", "product"):
            raise ValueError(f"reward.combine={self.method!r}: expected 'sum' or 'product'")

    def _weights(self, setting: str, rules: Mapping[str, Any] | None) -> dict[str, float]:
        """The checked weights of one setting, with accuracy first: other rules read its verdict."""
        weights = {
            str(name): float(weight)
            for name, weight in dict(rules or {}).items()
            if weight is not None
        }
        if not weights:
            raise ValueError(
                f"{setting} is empty: name at least one rule with its weight, "
                "such as {accuracy: 1.0}"
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
        return dict(sorted(weights.items(), key=lambda pair: pair[0] != "accuracy"))

    def __call__(self, item: RewardItem) -> RewardResult:
        """The reward of one item. Exceptions of a rule pass through; score_safely catches them."""
        weights = self.by_source.get(item.data_source, self.weights)
        parts: dict[str, float] = {}
        status, extracted, reasons = "ok", "", []
        for name, weight in weights.items():
            value = self.rules[name](item, self._options(name), parts)
            if isinstance(value, Grade):
                extracted, reasons = value.extracted, [*reasons, value.reason]
                if value.status != "ok" and (weight or weights.get("cosine_length")):
                    status = value.status
                value = value.accuracy if value.status == "ok" else None
            elif value is None:
                reasons.append(f"rule {name} does not apply")
            if value is None:  # Without a verdict there is no part: 0 would be read as "wrong".
                continue
            if not math.isfinite(value):
                raise ValueError(f"rule {name!r} returned {value!r}; expected a finite number")
            parts[name] = float(value)
        # No rule counts if reward models alone have a weight other than 0.
        counted = [name for name, weight in weights.items() if weight != 0.0]
        if status == "ok" and counted and not any(name in parts for name in counted):
            status = "ungradable"
        total = combine(parts, weights, self.method) if status == "ok" else math.nan
        reason = "; ".join(filter(None, reasons))
        return RewardResult(item.id, status, total, parts, extracted, reason)

    def _options(self, rule: str) -> dict[str, Any]:
        options = dict(self.options.get(rule) or {})
        if "max_tokens" in self.options:
            options.setdefault("max_tokens", self.options["max_tokens"])
        return options


def score_safely(scorer: Callable[[RewardItem], RewardResult], item: RewardItem) -> RewardResult:
    """The result of scorer(item), or one of status "error" if the scorer raises an exception."""
    try:
        return scorer(item)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        return RewardResult(item.id, "error", math.nan, {}, "", reason)
