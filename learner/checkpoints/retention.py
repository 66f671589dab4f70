"""Which checkpoints stay: the newest, and the best by a metric. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cluster.monitoring import metrics
from conf.schema import Config, ConfigError
from learner.evaluation.measures import MAJ_K, PASS_KS


def doomed(
    values: Mapping[int, float | None], written: int, keep: int, keep_best: int, mode: str
) -> list[int]:
    """Steps whose checkpoints are removed once that of step `written` is committed, oldest first.

    `values`: step -> value of the metric, or None where the checkpoint has none. These stay: the
    newest `keep` (0: all) and, of those with a value, the `keep_best` best by `mode` (max | min);
    of equal values the later. Steps later than `written` belong to a continuation that was given
    up, and are removed."""
    past = sorted(step for step in values if step <= written)
    sign = 1 if mode == "max" else -1
    ranked = sorted((sign * v, step) for step in past if (v := values[step]) is not None)
    newest = past[-keep:] if keep else past
    best = [step for _, step in ranked[-keep_best:]] if keep_best else []
    return sorted(set(values) - {written, *newest, *best})


def check_best(cfg: Config) -> None:
    """Raise ConfigError where checkpoint.keep_best could never choose a checkpoint."""
    c, e = cfg.checkpoint, cfg.evaluation
    if not c.keep:
        raise ConfigError(
            "checkpoint.keep_best",
            c.keep_best,
            "checkpoint.keep=0 keeps every checkpoint",
            "Set checkpoint.keep to how many of the newest shall stay.",
        )
    try:
        metrics.describe(c.metric)
    except metrics.MetricError as error:
        raise ConfigError(
            "checkpoint.metric", c.metric, "no such metric", "Names: docs/metrics.md."
        ) from error
    if metrics.METRICS.get(c.metric, metrics.M("", "")).reduce == "spread":
        raise ConfigError(
            "checkpoint.metric",
            c.metric,
            f"expected {c.metric}/mean, {c.metric}/min or {c.metric}/max",
        )
    if not c.metric.startswith("eval/"):
        return
    known = [f"pass@{k}" for k in PASS_KS if k <= e.samples_during]
    known = [
        f"eval/{m}" for m in (*known, f"maj@{min(MAJ_K, e.samples_during)}", "format", "length")
    ]
    if c.metric not in known:
        raise ConfigError(
            "checkpoint.metric",
            c.metric,
            f"with evaluation.samples_during={e.samples_during} expected one of {', '.join(known)}",
        )
    if not (c.every and e.every) or math.lcm(c.every, e.every) >= cfg.steps:
        raise ConfigError(
            "checkpoint.keep_best",
            c.keep_best,
            "no checkpoint would be written at a step that is "
            f"evaluated: checkpoint.every={c.every}, evaluation.every={e.every}, steps={cfg.steps}",
            "Make checkpoint.every a multiple of evaluation.every.",
        )
