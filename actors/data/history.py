"""The record of each prompt's results, and the curriculum over levels of difficulty. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.monitoring.vocabulary import LEARNABLE


def sampling_weights(pass_rates: np.ndarray, floor: float = 0.1) -> np.ndarray:
    """Sampling weight of each prompt, float64 in [floor, 1]: floor + (1 - floor) 4 p (1 - p).

    The reward variance p (1 - p) is largest at p = 0.5. The floor still samples solved and hopeless
    prompts, because their pass rates may change. ValueError for a rate or floor outside [0, 1].
    """
    p = np.asarray(pass_rates, dtype=np.float64)
    if not (0 <= floor <= 1) or ((p < 0) | (p > 1)).any():
        raise ValueError(
            f"pass rates must lie in [0, 1] and the floor too, but floor={floor}, "
            f"rates={p.min()}..{p.max()}"
        )
    return floor + (1 - floor) * 4 * p * (1 - p)


@dataclass
class PromptHistory:
    """The results of each prompt so far, as plain JSON. Each visit multiplies older counts by
    `decay`, so that old results count less.

    An entry: "graded" and "right" (decayed numbers of answers), "visits", "dead" (the last visits
    in a row that gave no gradient), "regime" and "step" (of the last visit).
    """

    decay: float = 0.5
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def update(self, prompt_id: str, right: int, graded: int, regime: str, step: int) -> None:
        """Add one visit, with `right` of `graded` answers. ValueError where right > graded."""
        if not 0 <= right <= graded:
            raise ValueError(f"prompt {prompt_id}: {right} right of {graded} graded answers")
        old = self.entries.get(prompt_id, {"graded": 0.0, "right": 0.0, "visits": 0, "dead": 0})
        self.entries[prompt_id] = {
            "graded": self.decay * old["graded"] + graded,
            "right": self.decay * old["right"] + right,
            "visits": old["visits"] + 1,
            "dead": 0 if regime == LEARNABLE else old["dead"] + 1,
            "regime": regime,
            "step": step,
        }

    def pass_rate(self, prompt_id: str) -> float:
        """(right + 1) / (graded + 2). It is 0.5 for a new prompt, the value sampled most often."""
        entry = self.entries.get(prompt_id)
        return 0.5 if entry is None else (entry["right"] + 1) / (entry["graded"] + 2)

    def acceptance(self, prompt_id: str, floor: float = 0.1) -> float:
        """Probability that a prompt is accepted when the stream draws it: 1 for a new prompt."""
        return float(sampling_weights(np.array([self.pass_rate(prompt_id)]), floor)[0])

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "entries": {p: dict(e) for p, e in self.entries.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptHistory:
        return cls(state["decay"], {p: dict(e) for p, e in state["entries"].items()})


@dataclass
class Curriculum:
    """Difficulty levels in ascending order. Training moves up a level once the last `window` groups
    of the current level reach a mean accuracy of `up`.

    `replay` is the probability that a prompt of a lower level is accepted; one of the current level
    always is. `position` is the index of the current level, `recent` the accuracies of its groups.
    """

    levels: list[int]
    up: float = 0.8
    window: int = 64
    replay: float = 0.2
    position: int = 0
    recent: list[float] = field(default_factory=list)

    def update(self, levels: Sequence[int], accuracies: Sequence[float]) -> bool:
        """Add finished groups, by level and mean accuracy. True when the curriculum moves up."""
        current = self.levels[self.position]
        new = [float(a) for level, a in zip(levels, accuracies, strict=True) if level == current]
        self.recent = (self.recent + new)[-self.window :]
        full = len(self.recent) == self.window
        mastered = full and sum(self.recent) / self.window >= self.up
        if not mastered or self.position == len(self.levels) - 1:
            return False
        self.position, self.recent = self.position + 1, []
        return True

    def acceptance(self, level: int) -> float:
        """Probability that a prompt of this level is accepted: 1, `replay` or 0."""
        if level == self.levels[self.position]:
            return 1.0
        return self.replay if level in self.levels[: self.position] else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "recent": list(self.recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.recent = int(state["position"]), list(state["recent"])
