"""Labels of steps from what becomes of them: Math-Shepherd (2312.08935), section 3.2. Pure.

The policy completes an answer from the end of each step, several times. A step is as good as its completions are often
right: the soft label is their share (equation 4), the hard one whether any is (equation 3). What could not be judged
(nan) counts in neither; a step of which nothing could be judged has no label.

    ids   1  2  +  3  0  =  4  2  +  4  =  4  6  ...  <eos>        ends [7, 12, T - 1]
    soft                       0.75          0.75  ...  1.0        the last is the answer itself, not completed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Label = tuple[float, float]  # soft, hard
Prefix = tuple[int, ...]


def prefixes(answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Prefix]:
    """What is to be completed for the answers of one prompt, given as (completion ids, step ends): the ids up to each
    end but the last. Each distinct one once, those of an answer from short to long: one continues the one before it,
    so that a prefix cache holds most of it."""
    return list(dict.fromkeys(tuple(ids[: end + 1]) for ids, ends in answers for end in ends[:-1]))


def label(accuracy: Sequence[float]) -> Label | None:
    """Of a step whose completions have these accuracies: right is 1 or more, nan is not judged; None if all are nan."""
    known = [a >= 1 for a in accuracy if a == a]
    return (sum(known) / len(known), float(any(known))) if known else None


def step_labels(
    ids: Sequence[int], ends: Sequence[int], accuracy: float, found: Mapping[Prefix, Label | None]
) -> list[Label] | None:
    """The label of each step of an answer: `found` has those of its prefixes; the last step's is whether the answer,
    of this accuracy, is right. None where one of them has none: nothing may then be learned from the answer."""
    labels = [found[tuple(ids[: end + 1])] for end in ends[:-1]] + [label([accuracy])]
    return None if None in labels else labels


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's, of two samples of equal length; None where one of them does not vary."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
