"""Every reward rule by its name in `reward.rules`. A new rule is one function and one line in
RULES.

A rule returns a number, or None if it does not apply. Only the rule `accuracy` returns a Grade,
which can also say that the answer could not be judged. A rule must not turn a failure into a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_service.rules.format import format_reward, tag_count_reward
from reward_service.rules.item import RewardItem, Rule
from reward_service.rules.shaping import (
    cosine_length_reward,
    language_reward,
    reasoning_steps_reward,
    repetition_reward,
    soft_overlong_reward,
)
from reward_service.rules.tasks import grade


def _max_tokens(item: RewardItem, options: Mapping[str, Any]) -> int:
    limit = int(options.get("max_tokens", item.max_tokens))
    if limit <= 0:
        raise ValueError("length rules need the completion budget: set reward.options.max_tokens")
    return limit


def _cosine_length(
    item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]
) -> float | None:
    """The cosine schedule for the item's verdict; None if the answer could not be judged."""
    if "accuracy" not in parts:
        return None  # Scorer refuses settings that lack the rule accuracy.
    shape = {key: options[key] for key in ("correct", "wrong", "exceeded") if key in options}
    return cosine_length_reward(
        item.completion_tokens, _max_tokens(item, options), parts["accuracy"] == 1.0, **shape
    )


def _soft_overlong(item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]) -> float:
    limit = _max_tokens(item, options)
    cache = int(options.get("cache", max(1, limit // 5)))
    return soft_overlong_reward(item.completion_tokens, limit, cache)


RULES: dict[str, Rule] = {
    "accuracy": lambda item, options, parts: grade(item, options),
    "format": lambda item, options, parts: format_reward(item.response),
    "tag_count": lambda item, options, parts: tag_count_reward(item.response),
    "language": lambda item, options, parts: language_reward(
        item.response, str(options.get("target", "en"))
    ),
    "cosine_length": _cosine_length,
    "soft_overlong": _soft_overlong,
    "repetition": lambda item, options, parts: repetition_reward(
        item.response, int(options.get("n", 4))
    ),
    "reasoning_steps": lambda item, options, parts: reasoning_steps_reward(
        item.response, int(options.get("steps", 3))
    ),
}
