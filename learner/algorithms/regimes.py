"""Regimes of groups, and what is done with dead groups. Pure.

The regime says what a group of sampled answers can teach. Accuracy says whether they are correct,
the diversity of the extracted answers whether they agree:

- saturated: all are correct. Nothing is left to learn.
- learnable: some are correct. The strongest signal.
- collapsed: all are wrong and most agree. The policy must explore.
- scattered: all are wrong and they differ. The group may become learnable.
- undetermined: fewer than two answers are graded.
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
from conf.settings import choices

FILTERS = choices("algorithm.filter")


def plurality_share(extracted: Sequence[str]) -> float:
    """Share of the most frequent answer, in (0, 1]; "" (nothing extracted) counts as an answer."""
    return max(Counter(extracted).values()) / len(extracted)


def classify(correct: Sequence[float], extracted: Sequence[str], alike: float = 0.5) -> str:
    """Regime of one group from its graded answers.

    ``correct``: 1 where an answer is correct; ``alike``: plurality share from which wrong answers
    count as collapsed. Callers leave out answers whose reward status is not ok. Raises ValueError
    when lengths differ."""
    if len(correct) != len(extracted):
        raise ValueError(
            f"a group has {len(correct)} grades but {len(extracted)} extracted answers"
        )
    if len(correct) < 2:
        return UNDETERMINED
    number_correct = sum(c >= 1 for c in correct)
    if number_correct:
        return SATURATED if number_correct == len(correct) else LEARNABLE
    return COLLAPSED if plurality_share(extracted) >= alike else SCATTERED


def classify_all(
    groups: np.ndarray,
    correct: np.ndarray,
    extracted: Sequence[str],
    valid: np.ndarray,
    alike: float = 0.5,
) -> dict[int, str]:
    """Regime by group id, in order of id.

    Arrays have one entry per sample, [N]. Invalid samples are left out; their groups are not."""
    members: dict[int, list[int]] = {int(g): [] for g in np.unique(np.asarray(groups))}
    for i in np.flatnonzero(np.asarray(valid, dtype=bool)):
        members[int(groups[i])].append(int(i))
    return {
        g: classify([correct[i] for i in m], [extracted[i] for i in m], alike)
        for g, m in members.items()
    }


def shares(regimes: Mapping[int, str]) -> dict[str, float]:
    """Share of the groups in each regime. The shares sum to 1; without groups there are none."""
    counts = Counter(regimes.values())
    return {name: counts[name] / len(regimes) for name in REGIMES} if regimes else {}


# -- dead groups -----------------------------------------------------------------------------------


def group_factors(kind: str, alive: np.ndarray, dead_weight: float = 0.1) -> np.ndarray:
    """Factor float64 [G] of each group in the loss; a group with factor 0 is left out.

    ``kind``: algorithm.filter; ``alive`` bool [G]: `advantages.group_stats(...).alive`. A dead
    group has advantage 0, but it costs a forward and backward pass and enters the normaliser; with
    a KL term in the loss it still pulls the policy towards the reference. `resample` leaves dead
    groups out as `skip_dead` does, and `groups_to_draw` replaces them. A group that is left out
    counts as filtered for the reason "dead". Raises ValueError for an unknown kind."""
    if kind not in FILTERS:
        raise ValueError(
            f"algorithm.filter={kind!r} is not known: expected one of {', '.join(FILTERS)}"
        )
    dead = {"none": 1.0, "down_weight": dead_weight}.get(kind, 0.0)
    return np.where(np.asarray(alive, dtype=bool), 1.0, dead)


def groups_to_draw(target: int, alive: int, finished: int, in_flight: int, limit: int) -> int:
    """How many more groups to start so that ``target`` groups are alive: DAPO's dynamic sampling.

    2503.14476, section 3.2, with a bound. ``alive`` of the ``finished`` groups are alive. Groups in
    flight are expected to be alive at the same rate, with Laplace's correction so that the rate is
    never 0. finished + in_flight never exceeds ``limit``; a result of 0 with nothing in flight
    means that the step trains on the groups it has. Alive groups beyond ``target`` are trained on
    in the same step: kept for the next one they would be off-policy, and dropped they would be
    wasted."""
    rate = (alive + 1) / (finished + 2)
    missing = target - alive - in_flight * rate
    if alive >= target or missing <= 0:
        return 0
    return max(0, min(int(np.ceil(missing / rate)), limit - finished - in_flight))
