"""From scored groups to what the learner is told: advantages, weights and placement. Pure: scalars in, scalars out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from actors.records import PLAN, GroupMeta
from learner import advantages, regimes
from learner.batching import Placement, place
from learner.losses import sample_weights


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


def read_scores(batches: Sequence[pa.RecordBatch]) -> Scores:
    """SCORED batches, one a group, as arrays."""

    def floats(name: str) -> np.ndarray:
        return np.array([np.nan if v is None else v for b in batches for v in b.column(name).to_pylist()], np.float64)

    def values(name: str, default: Any) -> list[Any]:
        return [default if v is None else v for b in batches for v in b.column(name).to_pylist()]

    statuses = values("status", "error")
    return Scores(floats("reward"), floats("accuracy"), floats("format"), np.array([s == "ok" for s in statuses]),
                  statuses, values("extracted", ""), [dict(p) for p in values("parts", [])], values("reason", ""))


def assemble(cfg: Any, metas: Sequence[GroupMeta], scores: Scores) -> Assembled:
    """Advantages from the ok rewards of each group, then weights and placement for the whole batch.

    Whole groups are filtered, never single samples: a sample without an ok reward keeps its place with weight 0 and
    enters no baseline (DESIGN invariant 4). Denominators are those of each optimizer step (invariant 2).
    """
    groups = np.concatenate([np.full(len(m.lengths), m.group_id, np.int64) for m in metas])
    lengths = np.concatenate([m.lengths for m in metas])
    prompt = np.concatenate([np.full(len(m.lengths), m.prompt_tokens, np.int64) for m in metas])
    valid = scores.valid.copy()
    if cfg.algorithm.mask_truncated:
        valid &= np.array([r != "length" for m in metas for r in m.finish_reasons])
    rewards = np.where(valid, scores.rewards, 0.0)
    late = needs_logprobs(cfg.algorithm)
    found = np.full(len(groups), np.nan) if late else advantages.compute(
        cfg.algorithm, rewards, groups, valid, lengths=lengths)
    seen = regimes.classify_all(groups, np.nan_to_num(scores.accuracy), scores.extracted,
                                scores.valid & ~np.isnan(scores.accuracy))
    kept, reasons = filter_groups(cfg.algorithm.filter, metas, rewards, groups, valid)
    use = np.isin(groups, [m.group_id for m, k in zip(metas, kept, strict=True) if k])
    advantage = np.where(use, found, 0.0)
    if not use.any():
        return Assembled(None, (), advantage, kept, reasons, seen)
    updates = min(cfg.learner.updates_per_batch, int(kept.sum()))
    rows = np.flatnonzero(use)
    where = place((prompt + lengths)[rows], groups[rows], updates, cfg.learner.ranks, cfg.learner.micro_batch_tokens)
    weights = np.zeros(len(rows))
    for u in range(updates):
        step = where.update == u
        weights[step] = sample_weights(cfg.algorithm.normaliser, lengths[rows][step], valid[rows][step],
                                       cfg.algorithm.loss_constant)
    table = np.concatenate([np.full(len(m.lengths), i, np.int64) for i, m in enumerate(metas)])
    row = np.concatenate([np.arange(len(m.lengths)) for m in metas])
    plan = make_plan(table[rows], row[rows], groups[rows], rewards[rows], valid[rows], advantage[rows], weights, where)
    return Assembled(plan, where.micro_batches, advantage, kept, reasons, seen)


def needs_logprobs(a: Any) -> bool:
    """Whether advantages depend on the policy's own log-probs (or values): then the learner computes them.

    KL in the reward, per-token returns, and DPO's coefficient do; token columns never come to the controller."""
    return a.advantage in advantages.TOKEN_LEVEL or a.advantage == "dpo" or (a.beta > 0 and a.kl_placement == "reward")


def make_plan(table: np.ndarray, row: np.ndarray, groups: np.ndarray, rewards: np.ndarray, valid: np.ndarray,
              advantage: np.ndarray, weights: np.ndarray, where: Placement) -> pa.RecordBatch:
    """records.PLAN from per-sample arrays [N]."""
    return pa.RecordBatch.from_arrays([
        pa.array(table, pa.int32()), pa.array(row, pa.int32()), pa.array(groups, pa.int64()), pa.array(rewards),
        pa.array(valid), pa.array(advantage), pa.array(weights), pa.array(where.rank, pa.int32()),
        pa.array(where.micro_batch, pa.int32()), pa.array(where.update, pa.int32())], schema=PLAN)


def filter_groups(kind: str, metas: Sequence[GroupMeta], rewards: np.ndarray, groups: np.ndarray,
                  valid: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """(bool [G] kept, reasons [G]): a group with no usable sample is always left out; with `skip_dead` also one whose
    rewards are all equal."""
    stats = advantages.group_stats(rewards, groups, valid)
    count = dict(zip(stats.ids.tolist(), stats.count.tolist(), strict=True))
    alive = dict(zip(stats.ids.tolist(), stats.alive.tolist(), strict=True))
    reasons = []
    for meta in metas:
        if not count[meta.group_id]:
            reasons.append("no sample with status ok")
        else:
            reasons.append("dead" if kind == "skip_dead" and not alive[meta.group_id] else "")
    return np.array([not r for r in reasons]), reasons
