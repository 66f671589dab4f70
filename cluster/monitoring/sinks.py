"""Where the metrics of a run go: metrics.jsonl, wandb and Ray's metrics; and how to read
metrics.jsonl back."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cluster.files import write_text
from cluster.monitoring.metrics import METRICS, describe, flatten
from cluster.monitoring.stat import MetricError, Stat
from cluster.security import redact_text

SCHEMA = "volley-metrics/1"


def line(step: int, flat: Mapping[str, float], now: float) -> str:
    """Return one line of metrics.jsonl. `now`: seconds since 1970. The line is always valid JSON: a
    value that is not finite is null, and its name is listed under "non_finite"."""
    non_finite = [name for name, value in flat.items() if not math.isfinite(value)]
    record: dict[str, Any] = {"step": step, "time": round(now, 3)}
    record |= {name: value if math.isfinite(value) else None for name, value in flat.items()}
    if non_finite:
        record["non_finite"] = non_finite
    return json.dumps(record, allow_nan=False)


class MetricLog:
    """Writes a run's metrics to RUN_DIR/metrics.jsonl and, if asked, to wandb and Ray's metrics.

    wandb: its mode; "disabled" leaves it out. wandb_id: from a checkpoint, to continue the same
        wandb run. The id of the present run is the attribute `wandb_id`.
    ray_metrics: whether Ray exports the values to Prometheus.
    run_meta: what the header of metrics.jsonl says about the run.
    resume_step: drop the rows after this step, because those steps will be repeated. None: begin a
        new file.
    settings: all settings of the run, secrets hidden (cluster/security.py), for wandb's table of
        runs.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        wandb: str = "disabled",
        wandb_project: str = "volley",
        ray_metrics: bool = False,
        run_meta: Mapping[str, Any] | None = None,
        wandb_id: str | None = None,
        resume_step: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(run_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.header = json.dumps(
            {
                "schema": SCHEMA,
                "run": dict(run_meta or {}),
                "units": {n: m.unit for n, m in METRICS.items()},
            }
        )
        self._begin(
            _rows_up_to(self.path, resume_step)
            if resume_step is not None and self.path.exists()
            else []
        )
        self.gauges: dict[str, Any] | None = {} if ray_metrics else None
        self.wandb_run, self.wandb_id = None, wandb_id
        if wandb != "disabled":
            self._start_wandb(wandb, wandb_project, {**(run_meta or {}), **(settings or {})})

    def _begin(self, rows: list[str]) -> None:
        """Write a file of the header and `rows`, and open it for more."""
        write_text(self.path, "\n".join([self.header, *rows]) + "\n")
        self.file = self.path.open("a")

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`, because those steps will be repeated."""
        self.file.close()
        self._begin(_rows_up_to(self.path, step))

    def _start_wandb(self, mode: str, project: str, meta: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # takes seconds, so only the runs that use it import it

        settings = wandb.Settings(silent=True, console="off", disable_git=True)
        # wandb stores the command line, which must not show secrets.
        with patch.object(sys, "argv", [redact_text(a) for a in sys.argv]):
            self.wandb_run = wandb.init(
                project=project,
                mode=mode,
                dir=str(self.path.parent),
                name=self.path.parent.name,
                config=meta,
                id=self.wandb_id,
                resume="allow" if self.wandb_id else None,
                settings=settings,
            )
        self.wandb_id = self.wandb_run.id
        # The x-axis of every chart is the run's step, because wandb's own counter counts rows.
        self.wandb_run.define_metric("step")
        self.wandb_run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float | Stat]) -> dict[str, float]:
        """Write one row. Returns its values by written name, with nan or inf where the file has
        null."""
        flat = flatten(values)
        now = time.time()
        self.file.write(line(step, flat, now) + "\n")
        self.file.flush()
        finite = {name: value for name, value in flat.items() if math.isfinite(value)}
        if self.wandb_run is not None:
            self.wandb_run.log({"step": step, **finite})
        if self.gauges is not None:
            self._set_gauges({"step": float(step), "time": now, **finite})
        return flat

    def _set_gauges(self, finite: Mapping[str, float]) -> None:
        from ray.util.metrics import Gauge

        for name, value in finite.items():
            if name not in self.gauges:
                metric = describe(name)
                self.gauges[name] = Gauge(prometheus_name(name), f"{metric.help} [{metric.unit}]")
            self.gauges[name].set(value)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the file and finish the wandb run, of which `summary` becomes the summary. Safe to
        call twice."""
        self.file.close()
        if self.wandb_run is not None:
            self.wandb_run.summary.update(dict(summary or {}))
            self.wandb_run.finish()
            self.wandb_run = None
            import wandb

            # End wandb's helper process now: its exit hook comes after the run's own clean-up.
            wandb.teardown()


def prometheus_name(name: str) -> str:
    """Return a name that Prometheus allows: volley_ and letters, digits and underscores."""
    return "volley_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def read(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (header, rows) of a metrics.jsonl. Raises MetricError, which names the line, where one
    is not JSON."""
    records = []
    for number, text in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            records.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise MetricError(
                f"{path} line {number} is not JSON ({error}); delete the line to go on"
            ) from error
    if not records or records[0].get("schema") != SCHEMA:
        raise MetricError(f"{path} does not begin with a header of schema {SCHEMA}")
    return records[0], records[1:]


def _rows_up_to(path: Path, step: int) -> list[str]:
    """Return the rows up to `step`. An incomplete last line, left by a process that was killed, is
    dropped."""
    rows = []
    lines = path.read_text().splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):
                continue
            raise MetricError(
                f"{path} line {number} is not JSON ({error}); delete the line to resume"
            ) from error
        if "schema" not in record and record["step"] <= step:
            rows.append(text)
    return rows
