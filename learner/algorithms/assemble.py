"""From scored groups to what the learner is told: advantages, weights and placement. Pure: scalars in, scalars out."""

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
    """Per-sample results of the rewards, all [N], in the order of the groups and their samples.

    rewards, accuracy: float64, nan unless the status is ok; valid: bool, status ok; extracted: the answers read.
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
    """`plan` and `micro_batches` go to the learner; `kept[g]` says which groups are in it; the rest is for the books.

    plan is None when nothing is left to train on.
    """

    plan: pa.RecordBatch | None
    micro_batches: tuple[int, ...]
    advantages: np.ndarray  # float64 [N], 0 where filtered or invalid
    kept: np.ndarray  # bool [G]
    reasons: list[str]  # [G], "" where kept
    regimes: dict[int, str]
    penalty: np.ndarray  # float64 [N], what the length took off each reward; 0 or less


def read_scores(batches: Sequence[pa.RecordBatch]) -> Scores:
    """SCORED batches, one a group, as arrays."""

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
    """Advantages from the ok rewards of each group, then weights and placement for the whole batch.

    Whole groups are filtered, never single samples: a sample without an ok reward keeps its place with weight 0 and
    enters no baseline (DESIGN invariant 4). Denominators are those of each optimizer step (invariant 2).
    """
    groups = np.concatenate([np.full(len(m.lengths), m.group_id, np.int64) for m in metas])
    lengths = np.concatenate([m.lengths for m in metas])
    prompt = np.concatenate([np.full(len(m.lengths), m.prompt_tokens, np.int64) for m in metas])
    rewards, valid, penalty = shaped(cfg, metas, scores)
    # Right is what the accuracy rule says: a format reward on top must not make a wrong answer right.
    judged = (
        np.where(np.isnan(scores.accuracy), rewards, scores.accuracy)
        if cfg.algorithm.advantage == "correct"
        else rewards
    )
    found = (
        np.full(len(groups), np.nan)
        if in_learner(cfg.algorithm)
        else advantages.compute(
            cfg.algorithm, np.where(valid, judged, 0.0), groups, valid, lengths=lengths
        )
    )
    seen = regimes.classify_all(
        groups,
        np.nan_to_num(scores.accuracy),
        scores.extracted,
        scores.valid & ~np.isnan(scores.accuracy),
    )
    factors, reasons = filter_groups(cfg, metas, rewards, groups, valid)
    kept = factors > 0
    use = np.isin(groups, [m.group_id for m, k in zip(metas, kept, strict=True) if k])
    advantage = np.where(use, found, 0.0)
    if not use.any():
        return Assembled(None, (), advantage, kept, reasons, seen, penalty)
    updates = min(cfg.learner.updates_per_batch, int(kept.sum()))
    rows = np.flatnonzero(use)
    where = place(
        (prompt + lengths)[rows],
        groups[rows],
        updates,
        cfg.learner.ranks,
        cfg.learner.micro_batch_tokens,
    )
    factor = np.repeat(factors, [len(m.lengths) for m in metas])[rows]
    weights = np.zeros(len(rows))
    for u in range(updates):
        step = where.update == u
        weights[step] = sample_weights(
            cfg.algorithm.normaliser,
            lengths[rows][step],
            valid[rows][step],
            cfg.algorithm.loss_constant,
            factors=factor[step],
        )
    table = np.concatenate([np.full(len(m.lengths), i, np.int64) for i, m in enumerate(metas)])
    row = np.concatenate([np.arange(len(m.lengths)) for m in metas])
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
    return Assembled(plan, where.micro_batches, advantage, kept, reasons, seen, penalty)


def shaped(
    cfg: Any, metas: Sequence[GroupMeta], scores: Scores
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rewards float64 [N], valid bool [N], penalty float64 [N]) that advantages are made of.

    The penalty is DAPO's for length (algorithm.options.overlong_share), already taken off the rewards; with
    mask_truncated answers cut at the budget are not valid. Rewards are 0 where not valid."""
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
    groups = np.concatenate([np.full(len(m.lengths), m.group_id, np.int64) for m in metas])
    return int(advantages.group_stats(rewards, groups, valid).alive.sum())


def needs_logprobs(a: Any) -> bool:
    """Whether advantages depend on the policy's own log-probs or on values: KL in the reward, DPO, a critic."""
    return a.advantage in ("dpo", "gae") or (a.beta > 0 and a.kl_placement == "reward")


def in_learner(a: Any) -> bool:
    """Whether the learner computes the advantages: those from log-probs, and those that differ from token to token.

    Token columns never come to the controller (DESIGN invariant 8)."""
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
    """records.PLAN from per-sample arrays [N]; `steps`: (rewards, ends), a list a sample, of process supervision."""
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
    """(float64 [G] factor of each group in the loss, 0: left out; reasons [G], "" where kept).

    A group with no usable sample is always left out; algorithm.filter says what becomes of one whose rewards are all
    equal. Orders are those of `metas`."""
    stats = advantages.group_stats(rewards, groups, valid)
    at = {g: i for i, g in enumerate(stats.ids.tolist())}
    order = [at[m.group_id] for m in metas]
    a = cfg.algorithm
    factors = regimes.group_factors(a.filter, stats.alive[order], a.options.get("dead_weight", 0.1))
    usable = stats.count[order] > 0
    reasons = [
        "" if f and u else "dead" if u else "no sample with status ok"
        for f, u in zip(factors, usable, strict=True)
    ]
    return factors * usable, reasons
