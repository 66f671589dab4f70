"""The values that pass through the reward service: the response to score and its reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reward_service.math.grade import Grade


@dataclass(frozen=True)
class RewardItem:
    """One response to score. `response` is the prefill followed by the completion.

    `gold` is the reference answer as the data set stores it. `completion_tokens` and `max_tokens`
    are in tokens. `truncated` says that the completion reached the length limit. `extra` holds the
    other columns of the prompt's row.

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
    """The reward of one item.

    `status` is "ok", "ungradable", "timeout" or "error". `total` is NaN unless the status is "ok".
    `parts` holds the unweighted value of every rule that could be computed. `extracted` is the
    final answer that was judged, and `reason` explains the verdict.
    """

    id: str
    status: str
    total: float
    parts: dict[str, float]
    extracted: str = ""
    reason: str = ""


# A rule receives the item, the rule's options, and the values of the rules computed before it.
# It returns a number, a Grade, or None if the rule does not apply to this item.
Rule = Callable[[RewardItem, Mapping[str, Any], dict[str, float]], float | Grade | None]
