"""The metrics of one step, from per-sample scalars. Pure.

Their names and units are defined in cluster/monitoring/metrics.py and listed in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.monitoring.metrics import LOSS_NAMES
from cluster.monitoring.stat import Stat
from cluster.monitoring.vocabulary import STATUSES
from learner.algorithms import regimes
from learner.algorithms.assemble import Assembled, Scores
from learner.evaluation.measures import MAJ_K, PASS_KS, RERANK_N, rerank, summarise


def step_metrics(
    groups: Sequence[Any],
    scores: Scores,
    batch: Assembled,
    result: dict[str, Any] | None,
    synced: dict[str, float],
    timing: dict[str, float],
    version: int,
    group_counts: dict[str, int],
    restarts: dict[str, int],
    models: Sequence[str] = (),
) -> dict[str, float | Stat]:
    """Everything that is logged in a step, by name.

    `groups`: objects with a `meta` (GroupMeta); `result`: of LearnerGroup.update, or None;
    `timing`: seconds by phase; `group_counts`: Ledger.counts(); `restarts`: by role of actor;
    `models`: names of the reward models.
    """
    metas = [g.meta for g in groups]
    lengths = np.concatenate([m.lengths for m in metas])
    prompts = np.array([m.prompt_tokens for m in metas])
    trained = version - bool(synced)  # the version that this step's gradient belongs to
    values: dict[str, float | Stat] = {
        "response_length": Stat.of(lengths.tolist()),
        "prompt_length": Stat.of(prompts.tolist()),
        "response_length/clip_ratio": float(
            np.mean([r == "length" for m in metas for r in m.finish_reasons])
        ),
        "advantage": Stat.of(batch.advantages.tolist()),
        "perf/total_num_tokens": float(
            lengths.sum() + sum(m.prompt_tokens * len(m.lengths) for m in metas)
        ),
        "training/policy_version": float(version),
        "training/staleness": Stat.of(
            [float(trained - m.version_min) for m in metas if m.version_min >= 0]
        ),
        "perf/trained_tokens": float(
            sum(
                m.lengths.sum() + m.prompt_tokens * len(m.lengths)
                for m, kept in zip(metas, batch.kept, strict=True)
                if kept
            )
        ),
        **(
            {"reward/overlong_penalty": Stat.of(batch.penalty.tolist())}
            if batch.penalty.any()
            else {}
        ),
        **{f"groups/{k}": float(v) for k, v in group_counts.items()},
        **{f"{role}/restarts": float(n) for role, n in restarts.items()},
        **{f"timing_s/{k}": v for k, v in timing.items()},
        **{f"regime/{k}": v for k, v in regimes.shares(batch.regimes).items()},
        **reward_metrics(metas, scores, models),
    }
    if result:
        values |= learner_metrics(result)
    if synced:
        values["sync/logprob_max_abs_diff"] = synced["probe_max_abs_diff"]
        values["sync/bytes"] = synced["bytes"]
    return values


def evaluation(
    groups: Sequence[Any], scores: Scores, samples: int, models: Sequence[str] = ()
) -> dict[str, Any]:
    """pass@k, maj@k, format and length of graded groups of `samples` answers each.

    With the names of reward models in `models`, also what choosing by their scores gives.
    """
    n = [len(g.meta.lengths) for g in groups]
    names = [g.prompt.prompt_id for g, k in zip(groups, n, strict=True) for _ in range(k)]
    found = summarise(
        names,
        [i for k in n for i in range(k)],
        list(scores.accuracy),
        list(scores.format),
        scores.extracted,
        [int(v) for g in groups for v in g.meta.lengths],
        ks=tuple(k for k in PASS_KS if k <= samples),
        maj_k=min(MAJ_K, samples),
    )
    if models:
        judged = {m: np.array([p.get(m, np.nan) for p in scores.parts], np.float64) for m in models}
        more = rerank(names, scores.accuracy, scores.extracted, judged, min(RERANK_N, samples))
        found |= {k: v for k, v in more.items() if k not in found}  # maj@8 may be there already
    return found


def reward_metrics(
    metas: Sequence[Any], scores: Scores, models: Sequence[str] = ()
) -> dict[str, float | Stat]:
    """Rewards of ok samples, the shares of all statuses, and how many groups have no variance.

    `models`: names of reward models, whose scores are compared with the gold answers.
    """
    ok = scores.valid
    values: dict[str, float | Stat] = {
        f"reward/{s}_share": float(np.mean([t == s for t in scores.statuses])) for s in STATUSES
    }
    if ok.any():
        values["reward"] = Stat.of(scores.rewards[ok].tolist())
    for name, column in (("accuracy", scores.accuracy), ("format", scores.format)):
        known = column[ok & ~np.isnan(column)]
        if len(known):
            values[f"reward/{name}"] = Stat.of(known.tolist())
    for name in sorted({k for p in scores.parts for k in p}):
        values[f"reward_part/{name}"] = Stat.of(
            [p[name] for p, good in zip(scores.parts, ok, strict=True) if good and name in p]
        )
    for name in models:
        both = [
            (p[name], a)
            for p, a, good in zip(scores.parts, scores.accuracy, ok, strict=True)
            if good and name in p and not np.isnan(a)
        ]
        if both:
            values[f"reward_gap/{name}"] = float(np.mean([score - right for score, right in both]))
    stds, start = [], 0
    for m in metas:
        mine = slice(start, start + len(m.lengths))
        start += len(m.lengths)
        if ok[mine].any():
            stds.append(float(np.std(scores.rewards[mine][ok[mine]])))
    values["reward/group_std"] = Stat.of(stds)
    values["reward/zero_std_share"] = float(np.mean([s < 1e-8 for s in stds])) if stds else 1.0
    return values


def learner_metrics(result: dict[str, Any]) -> dict[str, float | Stat]:
    stats, steps = result["stats"], result["steps"]
    values: dict[str, float | Stat] = {
        LOSS_NAMES[name]: stat for name, stat in stats.items() if name in LOSS_NAMES
    }
    if steps:  # none while only the critic learns
        values["actor/loss"] = stats["loss"].sum / len(steps)
        values["actor/grad_norm"] = Stat.of([s["grad_norm"] for s in steps])
        values["actor/lr"] = steps[-1]["learning_rate"]
        values["actor/skipped_steps"] = float(sum(s["skipped"] for s in steps))
    if "mismatch" in stats:
        values["training/rollout_logprob_diff"] = stats["mismatch"]
    return values
