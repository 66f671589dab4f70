"""The arrow picture: what kind of volley a group is, what to do with the dead ones, and which prompts to draw next.
Pure.

G answers are G arrows. Accuracy says whether they hit, the diversity of extracted answers whether they land together:

- saturated: all right. Finished, nothing to learn.
- learnable: some right. The strongest signal.
- collapsed: all wrong, alike. Needs exploration.
- scattered: all wrong, apart. May turn learnable.
- undetermined: fewer than two graded answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SATURATED, LEARNABLE, COLLAPSED, SCATTERED, UNDETERMINED = REGIMES = (
    "saturated",
    "learnable",
    "collapsed",
    "scattered",
    "undetermined",
)
FILTERS = ("none", "skip_dead", "down_weight", "resample")


def plurality_share(extracted: Sequence[str]) -> float:
    """Share of the most frequent answer, in (0, 1]; "" (no answer found) counts as one answer like any other."""
    return max(Counter(extracted).values()) / len(extracted)


def classify(correct: Sequence[float], extracted: Sequence[str], alike: float = 0.5) -> str:
    """Regime of one group from its graded answers: ``correct`` 1 = right; ``alike``: plurality share from which answers
    are alike.

    Callers leave out answers whose reward status is not ok. Raises ValueError when lengths differ."""
    if len(correct) != len(extracted):
        raise ValueError(f"a group has {len(correct)} grades but {len(extracted)} extracted answers")
    if len(correct) < 2:
        return UNDETERMINED
    right = sum(c >= 1 for c in correct)
    if right:
        return SATURATED if right == len(correct) else LEARNABLE
    return COLLAPSED if plurality_share(extracted) >= alike else SCATTERED


def classify_all(
    groups: np.ndarray, correct: np.ndarray, extracted: Sequence[str], valid: np.ndarray, alike: float = 0.5
) -> dict[int, str]:
    """Regime by group id, in order of id. Per-sample arrays [N]; invalid samples are left out, groups are not."""
    members: dict[int, list[int]] = {int(g): [] for g in np.unique(np.asarray(groups))}
    for i in np.flatnonzero(np.asarray(valid, dtype=bool)):
        members[int(groups[i])].append(int(i))
    return {g: classify([correct[i] for i in m], [extracted[i] for i in m], alike) for g, m in members.items()}


def shares(regimes: Mapping[int, str]) -> dict[str, float]:
    """Share of groups in each regime, groups over groups; they sum to 1 (empty input: no entries)."""
    counts = Counter(regimes.values())
    return {name: counts[name] / len(regimes) for name in REGIMES} if regimes else {}


# -- dead groups -------------------------------------------------------------------------------------------------------


def group_factors(kind: str, alive: np.ndarray, dead_weight: float = 0.1) -> np.ndarray:
    """Factor float64 [G] of each group in the loss; 0 = the group is left out whole (and counted as filtered, reason
    "dead").

    ``alive`` bool [G] is `advantages.group_stats(...).alive`. A dead group has no advantage but costs a forward and
    backward pass and enters the normaliser; with beta > 0 it still pulls towards the reference. ``kind``:
    algorithm.filter. `resample` leaves dead groups out as `skip_dead` does, and `groups_to_draw` replaces them. Raises
    ValueError for an unknown kind."""
    if kind not in FILTERS:
        raise ValueError(f"algorithm.filter={kind!r} is not known: expected one of {', '.join(FILTERS)}")
    dead = {"none": 1.0, "down_weight": dead_weight}.get(kind, 0.0)
    return np.where(np.asarray(alive, dtype=bool), 1.0, dead)


def groups_to_draw(wanted: int, alive: int, finished: int, in_flight: int, limit: int) -> int:
    """Dynamic sampling (DAPO section 3.2), bounded: how many more groups to start now so that ``wanted`` alive ones
    come together.

    ``alive`` of the ``finished`` groups are alive; those in flight are expected to be so at the same rate (Laplace:
    never 0). finished + in_flight never passes ``limit``; 0 with nothing in flight means: train on what is there.
    What comes alive beyond ``wanted`` is trained on as well, at once: kept for the next step it would be off-policy,
    thrown away it would be lost."""
    rate = (alive + 1) / (finished + 2)
    missing = wanted - alive - in_flight * rate
    if alive >= wanted or missing <= 0:
        return 0
    return max(0, min(int(np.ceil(missing / rate)), limit - finished - in_flight))


# -- which prompts next ------------------------------------------------------------------------------------------------


def sampling_weights(pass_rates: np.ndarray, floor: float = 0.1) -> np.ndarray:
    """Weight of each prompt, float64: floor + (1 - floor) 4 p (1 - p). The reward variance p (1 - p) is largest at p =
    0.5; the floor keeps solved and hopeless prompts in view, for they may change."""
    p = np.asarray(pass_rates, dtype=np.float64)
    if not (0 <= floor <= 1) or ((p < 0) | (p > 1)).any():
        raise ValueError(
            f"pass rates must lie in [0, 1] and the floor too, but floor={floor}, rates={p.min()}..{p.max()}"
        )
    return floor + (1 - floor) * 4 * p * (1 - p)


@dataclass
class PromptHistory:
    """What each prompt did so far. Old evidence fades: each visit multiplies the counts before it by ``decay``.

    An entry: {"graded", "right" (decayed), "visits", "dead" (dead visits in a row), "regime", "step"}. State is plain
    JSON."""

    decay: float = 0.5
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def update(self, prompt_id: str, right: int, graded: int, regime: str, step: int) -> None:
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
        """(right + 1) / (graded + 2): 0.5 for a prompt never seen, which is thereby drawn first."""
        entry = self.entries.get(prompt_id)
        return 0.5 if entry is None else (entry["right"] + 1) / (entry["graded"] + 2)

    def acceptance(self, prompt_id: str, floor: float = 0.1) -> float:
        """Chance that a prompt is taken when it comes up (`sampling_weights`): 1 for one never seen."""
        return float(sampling_weights(np.array([self.pass_rate(prompt_id)]), floor)[0])

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "entries": {p: dict(e) for p, e in self.entries.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptHistory:
        return cls(state["decay"], {p: dict(e) for p, e in state["entries"].items()})


@dataclass
class Curriculum:
    """Difficulty levels in ascending order: move up once the last ``window`` groups of the current level reach accuracy
    ``up``.

    ``replay``: how often a prompt of a lower level is taken, where one of the current level always is. State is plain
    JSON."""

    levels: list[int]
    up: float = 0.8
    window: int = 64
    replay: float = 0.2
    position: int = 0
    recent: list[float] = field(default_factory=list)

    def update(self, levels: Sequence[int], accuracies: Sequence[float]) -> bool:
        """Take in finished groups (their level and mean accuracy); True when the curriculum moves up."""
        current = self.levels[self.position]
        new = [float(a) for level, a in zip(levels, accuracies, strict=True) if level == current]
        self.recent = (self.recent + new)[-self.window :]
        full = len(self.recent) == self.window and sum(self.recent) / self.window >= self.up
        if not full or self.position == len(self.levels) - 1:
            return False
        self.position, self.recent = self.position + 1, []
        return True

    def acceptance(self, level: int) -> float:
        """Chance that a prompt of this level is taken when it comes up: 1, ``replay`` or 0."""
        if level == self.levels[self.position]:
            return 1.0
        return self.replay if level in self.levels[: self.position] else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "recent": list(self.recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.recent = int(state["position"]), list(state["recent"])
