"""The end of a run that trained a policy: summary.json, report.html and a table."""

from __future__ import annotations

import time
from typing import Any

from cluster.files import write_json
from cluster.monitoring.progress import comparison
from learner.evaluation.measures import RERANK_N
from learner.stages.rl.run import RLRun
from learner.state import State

MEASURES = ("pass@1", "pass@8", "pass@64", "maj@8", "format", "length")


def conclude(run: RLRun, state: State, after: dict[str, Any], setup_s: float) -> None:
    """Write summary.json and report.html, end the reward service, and print the table.

    `after`: the last evaluation; `setup_s`: seconds from the program's start to the first step.
    """
    cfg, run_dir = run.cfg, run.launch.run_dir
    run.rollout_log.flush()
    wall = time.monotonic() - run.launch.started
    names = list(MEASURES)
    if cfg.reward.models:
        majority = f"maj@{min(RERANK_N, cfg.evaluation.samples)}"
        names += [
            name
            for name in state.before
            if name == majority or name.startswith(("best@", "weighted_maj@"))
        ]
    summary = {
        "experiment": cfg.experiment,
        "model": cfg.model.name,
        "seed": cfg.seed,
        "steps": cfg.steps,
        "wall_s": round(wall, 1),
        "setup_s": round(setup_s, 1),
        "before": {name: state.before.get(name) for name in names},
        "after": {name: after.get(name) for name in names},
        "tokens_generated": state.tokens,
        "tokens_per_s": round(state.tokens / max(state.generating_s, 1e-9), 1),
        "sync_logprob_max_abs_diff": state.worst_mismatch,
        "groups": state.ledger.counts(),
    }
    write_json(run_dir / "summary.json", summary)
    run.log.close(summary)
    run.rewards.stop()
    if cfg.logging.report:
        from learner.reports.report import write

        write(run_dir)
    from rich.console import Console

    Console().print(comparison(summary["before"], summary["after"]))
    print(f"volley: done in {wall:.0f} s; results in {run_dir}", flush=True)
