"""How good a reward model is on labelled answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from learner.algorithms.reward_batches import units
from reward_service.models.labelled import Answers

CALIBRATION_BINS = 10


def auc(scores: Sequence[float], labels: Sequence[float]) -> float | None:
    """Area under the ROC curve: the probability that a correct item scores above a wrong one.

    An item is correct when its label is at least 0.5; ties count half. Computed from ranks
    (Mann-Whitney). None where all items are correct or all are wrong."""
    correct = np.asarray(labels, float) >= 0.5
    n, m = int(correct.sum()), int((~correct).sum())
    if not n or not m:
        return None
    ranks = pd.Series(np.asarray(scores, float)).rank().to_numpy()
    return float((ranks[correct].sum() - n * (n + 1) / 2) / (n * m))


def calibration_error(
    probabilities: Sequence[float], labels: Sequence[float], bins: int = CALIBRATION_BINS
) -> float:
    """Expected calibration error (Guo et al. 2017, 1706.04599, equation 3).

    It is |mean probability - mean label| of each of ``bins`` bins of equal width, weighted by the
    share of items in the bin."""
    p, y = np.asarray(probabilities, float), np.asarray(labels, float)
    bin_of = np.minimum((p * bins).astype(int), bins - 1)
    gaps = {b: abs(p[bin_of == b].mean() - y[bin_of == b].mean()) for b in set(bin_of.tolist())}
    return float(sum(gap * (bin_of == b).mean() for b, gap in gaps.items()))


def measure(
    logits: Sequence[Sequence[float]], answers: Answers, loss: str
) -> dict[str, float | None]:
    """The reported measures of a reward model on ``answers``.

    ``logits``: those at the ends of each answer, in order. With loss=pointwise, over the ends of
    all answers: auc, accuracy at logit 0, loss (mean cross-entropy in nats), brier and
    calibration_error. With loss=pairwise: auc, accuracy (share of pairs in the right order) and
    loss (mean over pairs, in nats); brier and calibration_error are None."""
    flat = np.concatenate([np.asarray(row, float) for row in logits])
    labels = np.concatenate([np.asarray(row, float) for row in answers.labels])
    if loss == "pairwise":
        pairs = units(answers, loss)
        margins = np.array([logits[chosen][0] - logits[rejected][0] for chosen, rejected in pairs])
        return {
            "auc": auc(flat, labels),
            "accuracy": float((margins > 0).mean()),
            "loss": float(np.logaddexp(0, -margins).mean()),
            "brier": None,
            "calibration_error": None,
        }
    probabilities = 1 / (1 + np.exp(-np.clip(flat, -500, 500)))
    # Cross-entropy of the labels against the logits, stable for any logit.
    entropy = np.logaddexp(0, flat) - labels * flat
    return {
        "auc": auc(flat, labels),
        "accuracy": float(((flat > 0) == (labels >= 0.5)).mean()),
        "loss": float(entropy.mean()),
        "brier": float(((probabilities - labels) ** 2).mean()),
        "calibration_error": calibration_error(probabilities, labels),
    }
