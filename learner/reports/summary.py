"""The end of a run: summary.json, report.html, and the table of before and after."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from cluster.monitoring.progress import comparison
from learner.evaluation.measures import RERANK_N

if TYPE_CHECKING:
    from learner.stages.rl import Trainer


def conclude(trainer: Trainer, after: dict[str, Any], setup_s: float) -> None:
    """Write summary.json and report.html; print the table. `after`: the last evaluation."""
    cfg = trainer.cfg
    trainer.rollout_log.flush()
    wall = time.monotonic() - trainer.started
    shown = ["pass@1", "pass@8", "pass@64", "maj@8", "format", "length"]
    if cfg.reward.models:
        plain = f"maj@{min(RERANK_N, cfg.evaluation.samples)}"
        shown += [
            k for k in trainer.before if k == plain or k.startswith(("best@", "weighted_maj@"))
        ]
    summary = {
        "experiment": cfg.experiment,
        "model": cfg.model.name,
        "seed": cfg.seed,
        "steps": cfg.steps,
        "wall_s": round(wall, 1),
        "setup_s": round(setup_s, 1),
        "before": {k: trainer.before.get(k) for k in shown},
        "after": {k: after.get(k) for k in shown},
        "tokens_generated": trainer.tokens,
        "tokens_per_s": round(trainer.tokens / max(trainer.generating_s, 1e-9), 1),
        "sync_logprob_max_abs_diff": trainer.worst_mismatch,
        "groups": trainer.ledger.counts(),
    }
    beside = trainer.run_dir / "summary.json.partial"
    beside.write_text(json.dumps(summary, indent=1) + "\n")
    beside.rename(trainer.run_dir / "summary.json")
    trainer.log.close(summary)
    trainer.rewards.stop()
    if cfg.logging.report:
        from learner.reports.report import write

        write(trainer.run_dir)
    from rich.console import Console

    Console().print(comparison(summary["before"], summary["after"]))
    print(f"volley: done in {wall:.0f} s; results in {trainer.run_dir}", flush=True)
