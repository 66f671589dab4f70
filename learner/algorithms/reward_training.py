"""Training of reward models: which answers make an optimizer step, and how good a model is. Pure: NumPy and Arrow.

The loss is learner/algorithms/losses.py's `pointwise_reward` or `pairwise_reward`; it runs in learner/engine/reward_rank.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import xxhash

from learner.algorithms.assemble import make_plan
from learner.algorithms.batching import Placement, place
from reward_service.models.labelled import Answers

BINS = 10  # of the calibration error


@dataclass(frozen=True)
class RewardJob:
    """One pass over some answers. `tables`: references of records with prompt_ids and completion_ids; `plan`:
    records.PLAN, labels and ends in step_rewards and step_ends; `micro_batches`: how many each rank runs."""

    version: int  # the optimizer step, for error messages
    tables: list[Any]
    plan: pa.RecordBatch
    micro_batches: int
    learning_rate: float = 0.0
    loss: str = "pointwise"


def held_out(prompt_ids: Sequence[str], share: float) -> np.ndarray:
    """bool [N]: whether an answer belongs to the held-out side: all answers of about `share` of the prompts, by the
    prompt's name alone, so that no prompt is on both sides, in whatever file it comes."""
    return np.array(
        [xxhash.xxh3_64_intdigest(p.encode()) % 10_000 < share * 10_000 for p in prompt_ids], bool
    )


def units(answers: Answers, loss: str) -> list[np.ndarray]:
    """What is drawn as one: every answer (pointwise), or every pair, chosen first (pairwise). Indices of answers."""
    if loss == "pointwise":
        return [np.array([i]) for i in range(len(answers))]
    members: dict[int, list[int]] = {}
    for i, number in enumerate(answers.pair.tolist()):
        if number >= 0:
            members.setdefault(number, []).append(i)
    return [np.array(m) for m in members.values()]


def draw(
    fresh: int, old: int, batch: int, steps: int, replay: float, seed: int
) -> list[np.ndarray]:
    """For each of `steps` optimizer steps `batch` units: indices below `fresh` are of this iteration, the `old` ones
    after them of earlier ones, of which each step takes the share `replay` (rounded; none where old is 0).

    Both kinds are gone through in shuffled epochs. A function of the arguments alone."""
    if fresh < 1:
        raise ValueError("no answer of this iteration to train on")
    rng = np.random.default_rng([seed, fresh, old])
    replayed = round(batch * replay) if old else 0

    def epochs(n: int, count: int) -> np.ndarray:
        shuffled = (
            [rng.permutation(n) for _ in range(-(-count // n))]
            if count
            else [np.empty(0, np.int64)]
        )
        return np.concatenate(shuffled)[:count]

    new = epochs(fresh, steps * (batch - replayed)).reshape(steps, -1)
    again = fresh + epochs(old, steps * replayed).reshape(steps, -1)
    return [np.concatenate(pair) for pair in zip(new, again, strict=True)]


def make_job(
    answers: Answers,
    chosen: Sequence[np.ndarray],
    loss: str,
    ranks: int,
    budget: int,
    step: int = 0,
    learning_rate: float = 0.0,
) -> RewardJob:
    """The job of the units `chosen`; both answers of a pair go to the same micro-batch, next to each other.

    Weights are those of the whole optimizer step (DESIGN invariant 2): pointwise every end counts alike, pairwise every
    pair. `budget`: padded tokens of a micro-batch, at least those of the longest unit. Raises BatchingError."""
    size = len(chosen[0])
    longest = np.array([answers.tokens[unit].max() for unit in chosen])
    where = place(longest, np.arange(len(chosen)), 1, ranks, budget // size)
    rows = np.concatenate(chosen)
    picked = answers.take(rows)
    spread = Placement(
        *(np.repeat(a, size) for a in (where.update, where.rank, where.micro_batch)),
        where.micro_batches,
    )
    total = len(chosen) if loss == "pairwise" else sum(map(len, picked.ends))
    n = len(rows)
    plan = make_plan(
        picked.table,
        picked.row,
        np.repeat(np.arange(len(chosen)), size),
        np.zeros(n),
        np.ones(n, bool),
        np.zeros(n),
        np.full(n, 1.0 / total),
        spread,
        [picked.labels, picked.ends],
    )
    return RewardJob(step, answers.tables, plan, where.micro_batches[0], learning_rate, loss)


# ---- how good it is ------------------------------------------------------------------------------------------


def auc(scores: Sequence[float], labels: Sequence[float]) -> float | None:
    """Chance that a right one (label >= 0.5) scores above a wrong one, ties half: the area under the ROC curve, from
    ranks (Mann-Whitney). None where one of the kinds is missing."""
    right = np.asarray(labels, float) >= 0.5
    n, m = int(right.sum()), int((~right).sum())
    if not n or not m:
        return None
    ranks = pd.Series(np.asarray(scores, float)).rank().to_numpy()
    return float((ranks[right].sum() - n * (n + 1) / 2) / (n * m))


def calibration_error(
    probabilities: Sequence[float], labels: Sequence[float], bins: int = BINS
) -> float:
    """Expected calibration error: |mean probability - share of right ones| of equally wide bins, weighted by how many
    fall into each (Guo et al., 1706.04599, equation 3)."""
    p, y = np.asarray(probabilities, float), np.asarray(labels, float)
    where = np.minimum((p * bins).astype(int), bins - 1)
    gaps = {b: abs(p[where == b].mean() - y[where == b].mean()) for b in set(where.tolist())}
    return float(sum(gap * (where == b).mean() for b, gap in gaps.items()))


def measure(
    logits: Sequence[Sequence[float]], answers: Answers, loss: str
) -> dict[str, float | None]:
    """What is reported of a model: accuracy at logit 0, auc, brier, calibration_error, loss (nats, mean over ends), of
    the ends of all answers; of a pairwise one accuracy is the share of pairs in the right order and the others None
    but auc. `logits`: those at the ends of each answer, in order."""
    flat = np.concatenate([np.asarray(row, float) for row in logits])
    labels = np.concatenate([np.asarray(row, float) for row in answers.labels])
    found: dict[str, float | None] = {"auc": auc(flat, labels)}
    if loss == "pairwise":
        margins = np.array(
            [logits[unit[0]][0] - logits[unit[1]][0] for unit in units(answers, loss)]
        )
        return found | {
            "accuracy": float((margins > 0).mean()),
            "loss": float(np.logaddexp(0, -margins).mean()),
            "brier": None,
            "calibration_error": None,
        }
    p = 1 / (1 + np.exp(-np.clip(flat, -500, 500)))
    entropy = (
        np.logaddexp(0, flat) - labels * flat
    )  # of the label against the logit, without exp of either
    return found | {
        "accuracy": float(((flat > 0) == (labels >= 0.5)).mean()),
        "loss": float(entropy.mean()),
        "brier": float(((p - labels) ** 2).mean()),
        "calibration_error": calibration_error(p, labels),
    }
