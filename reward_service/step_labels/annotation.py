"""Step labels from sampled completions: Math-Shepherd (arXiv:2312.08935), section 3.2. Pure
functions.

The policy completes an answer several times from the end of each step. The soft label of a step is
the share of its completions that are right (equation 4), and the hard label is 1 if any of them is
right (equation 3). Completions that could not be judged (nan) are left out. A step without a judged
completion has no label.

    ids   1  2  +  3  0  =  4  2  +  4  =  4  6  ...  <eos>        ends [7, 12, T - 1]
    soft                       0.75          0.75  ...  1.0        the last label is the answer's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Label = tuple[float, float]  # soft, hard
Prefix = tuple[int, ...]


def prefixes(answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Prefix]:
    """The prefixes to complete for the answers of one prompt, each given as (completion ids, step
    ends).

    A prefix holds the ids up to the end of a step; the last step is not completed. Each distinct
    prefix occurs once. The prefixes of an answer are ordered from short to long: each one continues
    the one before it, so that a prefix cache already holds most of it.
    """
    return list(dict.fromkeys(tuple(ids[: end + 1]) for ids, ends in answers for end in ends[:-1]))


def label(accuracy: Sequence[float]) -> Label | None:
    """The label of a step from the accuracies of its completions, or None if none was judged.

    A completion is right if its accuracy is at least 1, and was not judged if it is nan.
    """
    known = [a >= 1 for a in accuracy if a == a]
    return (sum(known) / len(known), float(any(known))) if known else None


def step_labels(
    ids: Sequence[int],
    ends: Sequence[int],
    accuracy: float,
    prefix_labels: Mapping[Prefix, Label | None],
) -> list[Label] | None:
    """The labels of the steps of an answer, or None if one of its steps has no label.

    `prefix_labels` holds the labels of the prefixes. The label of the last step says whether the
    answer, whose accuracy is `accuracy`, is right.
    """
    labels = [prefix_labels[tuple(ids[: end + 1])] for end in ends[:-1]] + [label([accuracy])]
    return None if None in labels else labels


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation of two samples of equal length; None if one of them does not vary."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
