"""Which labelled answers make an optimizer step of a reward model, and on which rank. Pure.

The loss is `pointwise_reward` or `pairwise_reward` (learner/algorithms/losses.py), and
learner/engine/reward_rank.py computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from learner.algorithms.assemble import make_plan
from learner.algorithms.batching import Placement, place
from reward_service.models.labelled import Answers


@dataclass(frozen=True)
class RewardJob:
    """One pass of a reward model over some answers: an optimizer step or an evaluation."""

    version: int  # the optimizer step, for error messages
    tables: list[Any]  # references of record batches with prompt_ids and completion_ids
    plan: pa.RecordBatch  # records.PLAN, with labels and ends in step_rewards and step_ends
    micro_batches: int  # of each rank
    learning_rate: float = 0.0
    loss: str = "pointwise"


def held_out(prompt_ids: Sequence[str], share: float) -> np.ndarray:
    """bool [N]: whether each answer belongs to the held-out set.

    The set has all answers of about ``share`` of the prompts. It depends on the prompt's id alone,
    so that no prompt is in both sets, whichever file it comes from."""
    return np.array(
        [xxhash.xxh3_64_intdigest(p.encode()) % 10_000 < share * 10_000 for p in prompt_ids], bool
    )


def units(answers: Answers, loss: str) -> list[np.ndarray]:
    """What a batch is drawn from: each answer (pointwise), or each pair, chosen first (pairwise).

    Each unit is an int array of indices of answers."""
    if loss == "pointwise":
        return [np.array([i]) for i in range(len(answers))]
    members: dict[int, list[int]] = {}
    for i, pair in enumerate(answers.pair.tolist()):
        if pair >= 0:
            members.setdefault(pair, []).append(i)
    return [np.array(m) for m in members.values()]


def draw(
    fresh: int, old: int, batch: int, steps: int, replay: float, seed: int
) -> list[np.ndarray]:
    """Indices of the ``batch`` units of each of ``steps`` optimizer steps; a pure function.

    Indices below ``fresh`` are units of this iteration; the ``old`` indices after them are units of
    earlier ones. Each step takes the share ``replay`` from the old units (rounded; nothing where
    there are none). Both kinds are drawn in shuffled epochs. Raises ValueError where ``fresh`` is
    0."""
    if fresh < 1:
        raise ValueError("no answer of this iteration to train on")
    rng = np.random.default_rng([seed, fresh, old])
    replayed = round(batch * replay) if old else 0

    def epochs(n: int, count: int) -> np.ndarray:
        if not count:
            return np.empty(0, np.int64)
        return np.concatenate([rng.permutation(n) for _ in range(-(-count // n))])[:count]

    from_fresh = epochs(fresh, steps * (batch - replayed)).reshape(steps, -1)
    from_old = fresh + epochs(old, steps * replayed).reshape(steps, -1)
    return [np.concatenate(pair) for pair in zip(from_fresh, from_old, strict=True)]


def make_job(
    answers: Answers,
    chosen: Sequence[np.ndarray],
    loss: str,
    ranks: int,
    budget: int,
    step: int = 0,
    learning_rate: float = 0.0,
) -> RewardJob:
    """The job that runs the units ``chosen`` once.

    Both answers of a pair go to the same micro-batch, next to each other. Weights are those of the
    whole optimizer step (DESIGN invariant 2): every end has the same weight (pointwise), or every
    pair (pairwise). ``budget``: padded tokens of a micro-batch, at least those of the longest
    unit. Raises BatchingError where a unit is longer."""
    size = len(chosen[0])  # answers per unit
    longest = np.array([answers.tokens[unit].max() for unit in chosen])
    unit_placement = place(longest, np.arange(len(chosen)), 1, ranks, budget // size)
    batch = answers.take(np.concatenate(chosen))
    placement = Placement(
        np.repeat(unit_placement.update, size),
        np.repeat(unit_placement.rank, size),
        np.repeat(unit_placement.micro_batch, size),
        unit_placement.micro_batches,
    )
    n = len(chosen) * size
    total = len(chosen) if loss == "pairwise" else sum(map(len, batch.ends))
    plan = make_plan(
        batch.table,
        batch.row,
        np.repeat(np.arange(len(chosen)), size),
        np.zeros(n),
        np.ones(n, bool),
        np.zeros(n),
        np.full(n, 1.0 / total),
        placement,
        [batch.labels, batch.ends],
    )
    return RewardJob(
        step, answers.tables, plan, unit_placement.micro_batches[0], learning_rate, loss
    )
