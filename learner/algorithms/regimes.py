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

import numpy as np

from cluster.monitoring.vocabulary import (
    COLLAPSED,
    LEARNABLE,
    REGIMES,
    SATURATED,
    SCATTERED,
    UNDETERMINED,
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
        raise ValueError(
            f"a group has {len(correct)} grades but {len(extracted)} extracted answers"
        )
    if len(correct) < 2:
        return UNDETERMINED
    right = sum(c >= 1 for c in correct)
    if right:
        return SATURATED if right == len(correct) else LEARNABLE
    return COLLAPSED if plurality_share(extracted) >= alike else SCATTERED


def classify_all(
    groups: np.ndarray,
    correct: np.ndarray,
    extracted: Sequence[str],
    valid: np.ndarray,
    alike: float = 0.5,
) -> dict[int, str]:
    """Regime by group id, in order of id. Per-sample arrays [N]; invalid samples are left out, groups are not."""
    members: dict[int, list[int]] = {int(g): [] for g in np.unique(np.asarray(groups))}
    for i in np.flatnonzero(np.asarray(valid, dtype=bool)):
        members[int(groups[i])].append(int(i))
    return {
        g: classify([correct[i] for i in m], [extracted[i] for i in m], alike)
        for g, m in members.items()
    }


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
        raise ValueError(
            f"algorithm.filter={kind!r} is not known: expected one of {', '.join(FILTERS)}"
        )
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
