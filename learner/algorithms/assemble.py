"""From scored groups to the learner's plan: advantages, weights and placement. Pure.

Only scalars of the samples go in and come out; tokens stay in the object store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from actors.records import PLAN, GroupMeta
from learner.algorithms import advantages, regimes
from learner.algorithms.batching import Placement, place
from learner.algorithms.losses import sample_weights


@dataclass(frozen=True)
class Scores:
    """Results of the rewards by sample, all [N], in the order of the groups and their samples.

    `rewards`, `accuracy`, `format`: float64, nan unless the status is ok; `valid`: bool, status ok;
    `extracted`: the answers as the rules read them.
    """

    rewards: np.ndarray
    accuracy: np.ndarray
    format: np.ndarray
    valid: np.ndarray
    statuses: list[str]
    extracted: list[str]
    parts: list[dict[str, float]]
    reasons: list[str]
    step_rewards: list[list[float] | None]
    step_ends: list[list[int] | None]


@dataclass(frozen=True)
class Assembled:
    """What is trained on (`plan`, `micro_batches`), and what became of every group.

    `plan` is None when nothing is left to train on. `kept[g]` says whether group g is in it.
    """

    plan: pa.RecordBatch | None
    micro_batches: tuple[int, ...]
    advantages: np.ndarray  # float64 [N], 0 where filtered or invalid
    kept: np.ndarray  # bool [G]
    reasons: list[str]  # [G], "" where kept
    regimes: dict[int, str]  # group id -> regime
    penalty: np.ndarray  # float64 [N], what the length took off each reward; 0 or less


def read_scores(batches: Sequence[pa.RecordBatch]) -> Scores:
    """The SCORED batches of some groups as arrays."""

    def floats(name: str) -> np.ndarray:
        return np.array(
            [np.nan if v is None else v for b in batches for v in b.column(name).to_pylist()],
            np.float64,
        )

    def values(name: str, default: Any) -> list[Any]:
        return [default if v is None else v for b in batches for v in b.column(name).to_pylist()]

    statuses = values("status", "error")
    return Scores(
        floats("reward"),
        floats("accuracy"),
        floats("format"),
        np.array([s == "ok" for s in statuses]),
        statuses,
        values("extracted", ""),
        [dict(p) for p in values("parts", [])],
        values("reason", ""),
        values("step_rewards", None),
        values("step_ends", None),
    )


def assemble(cfg: Any, metas: Sequence[GroupMeta], scores: Scores) -> Assembled:
    """Advantages from the ok rewards of each group, then weights and placement of the whole batch.

    Whole groups are filtered, never single samples: a sample without an ok reward keeps its place
    with weight 0 and enters no baseline (DESIGN invariant 4). Denominators are those of each
    optimizer step (invariant 2).
    """
    groups = group_ids(metas)
    rewards, valid, penalty = shaped(cfg, metas, scores)
    known = scores.valid & ~np.isnan(scores.accuracy)
    by_group = regimes.classify_all(groups, np.nan_to_num(scores.accuracy), scores.extracted, known)
    factors, reasons = filter_groups(cfg, metas, rewards, groups, valid)
    kept = factors > 0
    trained = np.repeat(kept, [len(m.lengths) for m in metas])
    advantage = np.where(trained, driver_advantages(cfg, metas, scores, rewards, valid), 0.0)
    if not trained.any():
        return Assembled(None, (), advantage, kept, reasons, by_group, penalty)
    plan, micro_batches = plan_samples(cfg, metas, scores, rewards, valid, advantage, factors)
    return Assembled(plan, micro_batches, advantage, kept, reasons, by_group, penalty)


def group_ids(metas: Sequence[GroupMeta]) -> np.ndarray:
    """int64 [N]: the group of each sample."""
    return np.concatenate([np.full(len(m.lengths), m.group_id, np.int64) for m in metas])


def driver_advantages(
    cfg: Any, metas: Sequence[GroupMeta], scores: Scores, rewards: np.ndarray, valid: np.ndarray
) -> np.ndarray:
    """float64 [N]: the advantage of each sample; nan where the learner computes it."""
    if in_learner(cfg.algorithm):
        return np.full(len(rewards), np.nan)
    judged = rewards
    if cfg.algorithm.advantage == "correct":
        # The accuracy rule says what is right: a format reward makes no wrong answer right.
        judged = np.where(np.isnan(scores.accuracy), rewards, scores.accuracy)
    lengths = np.concatenate([m.lengths for m in metas])
    return advantages.compute(
        cfg.algorithm, np.where(valid, judged, 0.0), group_ids(metas), valid, lengths=lengths
    )


def plan_samples(
    cfg: Any,
    metas: Sequence[GroupMeta],
    scores: Scores,
    rewards: np.ndarray,
    valid: np.ndarray,
    advantage: np.ndarray,
    factors: np.ndarray,
) -> tuple[pa.RecordBatch, tuple[int, ...]]:
    """(records.PLAN, micro-batches of each optimizer step) of the groups whose factor is above 0.

    `factors` float64 [G]: how much a group counts in the loss; the other arrays are per sample,
    [N].
    """
    sizes = [len(m.lengths) for m in metas]
    groups, lengths = group_ids(metas), np.concatenate([m.lengths for m in metas])
    prompt = np.repeat([m.prompt_tokens for m in metas], sizes)
    factor = np.repeat(factors, sizes)
    rows = np.flatnonzero(factor > 0)
    updates = min(cfg.learner.updates_per_batch, int((factors > 0).sum()))
    where = place(
        (prompt + lengths)[rows],
        groups[rows],
        updates,
        cfg.learner.ranks,
        cfg.learner.micro_batch_tokens,
    )
    weights = np.zeros(len(rows))
    for u in range(updates):
        step = where.update == u
        weights[step] = sample_weights(
            cfg.algorithm.normaliser,
            lengths[rows][step],
            valid[rows][step],
            cfg.algorithm.loss_constant,
            factors=factor[rows][step],
        )
    table = np.repeat(np.arange(len(metas)), sizes)
    row = np.concatenate([np.arange(n) for n in sizes])
    steps = [[column[i] for i in rows] for column in (scores.step_rewards, scores.step_ends)]
    plan = make_plan(
        table[rows],
        row[rows],
        groups[rows],
        rewards[rows],
        valid[rows],
        advantage[rows],
        weights,
        where,
        steps if cfg.algorithm.advantage == "process" else None,
    )
    return plan, where.micro_batches


def shaped(
    cfg: Any, metas: Sequence[GroupMeta], scores: Scores
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rewards float64 [N], valid bool [N], penalty float64 [N]) that advantages are made of.

    The penalty is DAPO's for length (2503.14476, equation 13; algorithm.options.overlong_share),
    already added to the rewards. With algorithm.mask_truncated, answers that were cut at the budget
    are not valid. Rewards are 0 where not valid.
    """
    valid, penalty = scores.valid.copy(), np.zeros(len(scores.valid))
    if cfg.algorithm.mask_truncated:
        valid &= np.array([r != "length" for m in metas for r in m.finish_reasons])
    share = cfg.algorithm.options.get("overlong_share")
    if share:
        budget = cfg.rollout.max_tokens
        penalty = advantages.overlong_penalty(
            np.concatenate([m.lengths for m in metas]), budget, max(1, round(share * budget))
        )
    return np.where(valid, scores.rewards + penalty, 0.0), valid, np.where(valid, penalty, 0.0)


def alive(cfg: Any, metas: Sequence[GroupMeta], scores: Scores) -> int:
    """How many groups have rewards that differ, so that something can be learned from them."""
    rewards, valid, _ = shaped(cfg, metas, scores)
    return int(advantages.group_stats(rewards, group_ids(metas), valid).alive.sum())


def needs_logprobs(a: Any) -> bool:
    """Whether advantages depend on the policy's own log-probs, or on values of a critic.

    That is so for a KL term in the reward, for DPO, and for PPO.
    """
    return a.advantage in ("dpo", "gae") or (a.beta > 0 and a.kl_placement == "reward")


def in_learner(a: Any) -> bool:
    """Whether the learner computes the advantages, because they need log-probs or differ by token.

    Token columns never come to the driver (DESIGN invariant 8).
    """
    return needs_logprobs(a) or a.advantage in advantages.TOKEN_LEVEL


def make_plan(
    table: np.ndarray,
    row: np.ndarray,
    groups: np.ndarray,
    rewards: np.ndarray,
    valid: np.ndarray,
    advantage: np.ndarray,
    weights: np.ndarray,
    where: Placement,
    steps: Sequence[list[Any]] | None = None,
) -> pa.RecordBatch:
    """records.PLAN from per-sample arrays [N].

    `steps`: (step rewards, step ends) of process supervision, each a list for every sample.
    """
    step_rewards, step_ends = steps or ([None] * len(table), [None] * len(table))
    return pa.RecordBatch.from_arrays(
        [
            pa.array(table, pa.int32()),
            pa.array(row, pa.int32()),
            pa.array(groups, pa.int64()),
            pa.array(rewards),
            pa.array(valid),
            pa.array(advantage),
            pa.array(weights),
            pa.array(where.rank, pa.int32()),
            pa.array(where.micro_batch, pa.int32()),
            pa.array(where.update, pa.int32()),
            pa.array(step_rewards, pa.list_(pa.float64())),
            pa.array(step_ends, pa.list_(pa.int32())),
        ],
        schema=PLAN,
    )


def filter_groups(
    cfg: Any, metas: Sequence[GroupMeta], rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """(factor of each group in the loss, float64 [G]; why it is left out, [G], "" where it is not).

    A factor of 0 leaves a group out. That is always so for a group without a usable sample;
    algorithm.filter says what becomes of a group whose rewards are all equal. Both are in the order
    of `metas`.
    """
    stats = advantages.group_stats(rewards, groups, valid)
    position_of = {g: i for i, g in enumerate(stats.ids.tolist())}
    order = [position_of[m.group_id] for m in metas]
    a = cfg.algorithm
    factors = regimes.group_factors(a.filter, stats.alive[order], a.options.get("dead_weight", 0.1))
    usable = stats.count[order] > 0
    reasons = [
        "" if f and u else "dead" if u else "no sample with status ok"
        for f, u in zip(factors, usable, strict=True)
    ]
    return factors * usable, reasons
