"""The report of a run, report.html and report.png: `python -m learner.reports.report RUN_DIR`.

It reads metrics.jsonl, summary.json (absent during a run) and rollouts/*.parquet (optional) in
RUN_DIR. The page is one self-contained file, and all text that a model wrote is escaped.
"""

from __future__ import annotations

import base64
import io
import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from cluster.files import write_bytes, write_text
from cluster.monitoring.progress import comparison_rows, duration
from cluster.monitoring.sinks import read
from cluster.monitoring.stat import MetricError
from cluster.monitoring.vocabulary import REGIMES

Rows = Sequence[dict[str, Any]]
COLUMNS = [
    "step",
    "prompt_id",
    "sample_index",
    "prompt",
    "completion",
    "reward",
    "status",
    "finish_reason",
]
SAMPLES = 4  # number of completions shown of the first and of the last step
# Title, y label and lines (metric, label). A panel of which no line was measured is left out.
PANELS = (
    (
        "Reward and accuracy",
        "",
        (
            ("reward/mean", "reward"),
            ("reward/accuracy", "accuracy"),
            ("reward/format", "format"),
            ("eval/pass@1", "held-out pass@1"),
        ),
    ),
    (
        "Answer length",
        "tokens",
        (("response_length/mean", "mean"), ("eval/length", "held-out mean")),
    ),
    (
        "Entropy and KL",
        "nats",
        (("actor/entropy", "entropy"), ("actor/kl_loss", "KL to reference")),
    ),
    ("Loss", "nats", (("pretrain/loss", "cross-entropy"),)),
    ("Gradient norm", "", (("actor/grad_norm", "before clipping"),)),
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222}\nimg{width:100%}table{border-collapse:collapse}td,th{padding:.2rem .9rem;"
    "border-bottom:1px solid #ddd;text-align:right}\ntd:first-child,th:first-child{text-align:left}"
    "pre{white-space:pre-wrap;background:#f5f5f5;padding:.6rem;margin:.2rem 0}\n"
    ".prompt{color:#777}"
)


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the rows that have the metric; null becomes nan, a gap in the line."""
    measured = [row for row in rows if name in row]
    values = [math.nan if row[name] is None else row[name] for row in measured]
    return [row["step"] for row in measured], values


def figure(rows: Rows) -> Any:
    """All plots of a run as one matplotlib Figure, two panels a row."""
    from matplotlib.figure import Figure

    panels = [
        (title, unit, measured)
        for title, unit, lines in PANELS
        if (measured := [line for line in lines if series(rows, line[0])[0]])
    ]
    timings = sorted(
        {n for row in rows for n in row if n.startswith("timing_s/")} - {"timing_s/step"}
    )
    stacks = [
        ("Wall time of a step", "s", timings, [n.partition("/")[2] for n in timings]),
        ("Groups by regime", "share", [f"regime/{r}" for r in REGIMES], list(REGIMES)),
    ]
    stacks = [s for s in stacks if any(series(rows, n)[0] for n in s[2])]
    count = max(1, len(panels) + len(stacks))
    fig = Figure(figsize=(11, 2.9 * math.ceil(count / 2)), layout="constrained", dpi=110)
    axes = list(fig.subplots(math.ceil(count / 2), 2, squeeze=False).flat)
    for axis, (title, unit, lines) in zip(axes, panels, strict=False):
        for name, label in lines:
            steps, values = series(rows, name)
            axis.plot(
                steps,
                values,
                label=label,
                marker="o" if name.startswith("eval/") or len(steps) == 1 else None,
            )
        axis.set(title=title, ylabel=unit, xlabel="step")
    for axis, (title, unit, names, labels) in zip(axes[len(panels) :], stacks, strict=False):
        measured = [row for row in rows if any(name in row for name in names)]
        layers = [[row.get(name) or 0.0 for row in measured] for name in names]
        axis.stackplot([row["step"] for row in measured], layers, labels=labels)
        axis.set(title=title, ylabel=unit, xlabel="step")
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes[:count]:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    return fig


def samples(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Completions to show, by step: of the first and the last step, one per prompt.

    Prompts that both steps have come first. Raises MetricError where a column is missing."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    files = sorted((run_dir / "rollouts").glob("*.parquet"))
    if not files:
        return {}
    data = ds.dataset([str(f) for f in files], format="parquet")
    if missing := [c for c in COLUMNS if c not in data.schema.names]:
        raise MetricError(
            f"{run_dir / 'rollouts'} has no column {', '.join(missing)}: not written by this "
            "version?"
        )
    range_of_steps = pc.min_max(data.to_table(columns=["step"])["step"]).as_py()
    by_step = {}  # step -> prompt id -> row
    for step in {range_of_steps["min"], range_of_steps["max"]}:
        rows = data.to_table(columns=COLUMNS, filter=pc.field("step") == step).to_pylist()
        first: dict[str, dict[str, Any]] = {}
        for row in sorted(rows, key=lambda r: (r["prompt_id"], r["sample_index"])):
            first.setdefault(row["prompt_id"], row)
        by_step[step] = first
    shared = set.intersection(*(set(first) for first in by_step.values()))
    order = {
        step: sorted(first, key=lambda p: (p not in shared, p)) for step, first in by_step.items()
    }
    return {step: [by_step[step][p] for p in order[step][:SAMPLES]] for step in sorted(by_step)}


def page(
    title: str, summary: dict[str, Any], png: bytes, completions: dict[int, list[dict[str, Any]]]
) -> str:
    """The HTML page. All text from outside is escaped here and nowhere else.

    `completions`: rows of the rollouts to show, by step."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{STYLE}</style>"
    ]
    parts.append(f"<h1>{escape(title)}</h1>")
    facts = {k: v for k, v in summary.items() if not isinstance(v, dict)}
    facts |= {
        k: duration(facts[k])
        for k in ("wall_s", "setup_s")
        if isinstance(facts.get(k), int | float)
    }
    parts.append(
        "<p>" + " · ".join(f"{escape(str(k))} {escape(str(v))}" for k, v in facts.items()) + "</p>"
    )
    if summary.get("before") and summary.get("after"):
        lines = [
            ("held-out set", "before", "after", "change"),
            *comparison_rows(summary["before"], summary["after"]),
        ]
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in lines]
        parts.append("<table><tr>" + "</tr><tr>".join(cells) + "</tr></table>")
    image = base64.b64encode(png).decode()
    parts.append(f'<p><img alt="Plots of the run" src="data:image/png;base64,{image}"></p>')
    for step, rows in completions.items():
        parts.append(f"<h2>Completions at step {step}</h2>")
        for row in rows:
            reward = row["status"] if row["reward"] is None else f"reward {row['reward']:.3g}"
            parts.append(
                f"<pre><span class=prompt>{escape(row['prompt'])}</span>"
                f"{escape(row['completion'])}</pre>"
            )
            parts.append(
                f"<p>{escape(reward)}, finished by {escape(str(row['finish_reason']))}</p>"
            )
    return "\n".join(parts) + "</html>\n"


def write(run_dir: str | Path) -> Path:
    """Write report.html and report.png and return the page's path.

    Raises MetricError where the folder has no metrics.jsonl."""
    run_dir = Path(run_dir)
    if not (run_dir / "metrics.jsonl").is_file():
        raise MetricError(
            f"{run_dir} has no metrics.jsonl: give the folder of a run, such as outputs/r1_zero-..."
        )
    _, rows = read(run_dir / "metrics.jsonl")
    summary_file = run_dir / "summary.json"
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    buffer = io.BytesIO()
    figure(rows).savefig(buffer, format="png", metadata={"Software": None})
    write_bytes(run_dir / "report.png", buffer.getvalue())
    target = run_dir / "report.html"
    write_text(target, page(run_dir.resolve().name, summary, buffer.getvalue(), samples(run_dir)))
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m learner.reports.report RUN_DIR")
    try:
        print(write(sys.argv[1]))
    except MetricError as error:
        sys.exit(f"report: {error}")
