"""Comparison of finished runs, as FOLDER/comparison.md and FOLDER/comparison.png.

`python -m learner.reports.compare FOLDER` writes them. FOLDER holds runs named LABEL-seedN, as
experiment=compare_algorithms makes them; runs with one label are averaged. Samples are the answers
of the groups that a run has trained on or filtered, and accuracy is held-out pass@1. A spread is
the sample standard deviation over seeds. The speed of a run is its number of samples at the first
evaluation at or above the highest multiple of 0.05 that every run reached.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.files import atomic, write_text
from cluster.monitoring.sinks import read
from cluster.monitoring.stat import MetricError

STEP = 0.05  # the accuracy at which samples are counted is a multiple of this
HEADER = (
    "",
    "runs",
    "pass@1 before",
    "pass@1 after",
    "maj@8 after",
    "format after",
    "length after",
    "samples",
    "learner tokens",
    "minutes",
)
# The columns that a terminal has room for.
IN_TERMINAL = ("", "runs", "pass@1 after", "maj@8 after", "samples", "learner tokens")


@dataclass(frozen=True)
class Run:
    """One finished run."""

    label: str
    summary: dict[str, Any]  # the content of summary.json
    curve: tuple[tuple[float, float], ...]  # (samples, held-out pass@1) of each evaluation
    samples: float
    # Prompt and completion tokens that the learner trained on; None where it was not measured.
    learner_tokens: float | None
    # (samples, mean score of the reward model, gold accuracy) of each step's training answers;
    # empty where rewards came from no model.
    judged: tuple[tuple[float, float, float], ...] = ()


def load(folder: Path) -> Run:
    """Read one run. Raises MetricError or OSError where the folder holds no finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    size = yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["group_size"]
    _, rows = read(folder / "metrics.jsonl")
    samples = {0: 0.0} | {
        r["step"]: size * (r["groups/trained"] + r["groups/filtered"])
        for r in rows
        if "groups/trained" in r
    }
    curve = tuple(
        (samples[r["step"]], r["eval/pass@1"]) for r in rows if r.get("eval/pass@1") is not None
    )
    trained = [r["perf/trained_tokens"] for r in rows if "perf/trained_tokens" in r]
    gap = next((k for r in rows for k in r if k.startswith("reward_gap/")), "")
    judged = tuple(
        (samples[r["step"]], r["reward/accuracy"] + r[gap], r["reward/accuracy"])
        for r in rows
        if gap in r
    )
    return Run(
        re.sub(r"-seed\d+$", "", folder.name),
        summary,
        curve,
        samples[max(samples)],
        sum(trained) if trained else None,
        judged,
    )


def spread(values: Sequence[float | None], form: str) -> str:
    """Mean and spread of the known values as text, or "-" where there are none.

    `form`: format of a number, such as "{:.3f}". A single value has no spread."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    mean = form.format(statistics.fmean(known))
    return f"{mean} ± {form.format(statistics.stdev(known))}" if len(known) > 1 else mean


def common(runs: Sequence[Run]) -> float:
    """The highest multiple of STEP that every run's curve reached; 0 where a run has no curve."""
    return STEP * math.floor(
        min(max((v for _, v in r.curve), default=0.0) for r in runs) / STEP + 1e-9
    )


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The table: HEADER with a column "samples to LEVEL", then one row per label, sorted."""
    level = common(runs)
    out: list[tuple[str, ...]] = [(*HEADER, f"samples to {level:.2f}")]
    for label in sorted({r.label for r in runs}):
        same = [r for r in runs if r.label == label]
        after = [r.summary["after"] for r in same]
        out.append(
            (
                label,
                str(len(same)),
                spread([r.summary["before"]["pass@1"] for r in same], "{:.3f}"),
                *(
                    spread([a.get(key) for a in after], form)
                    for key, form in (
                        ("pass@1", "{:.3f}"),
                        ("maj@8", "{:.3f}"),
                        ("format", "{:.3f}"),
                        ("length", "{:.1f}"),
                    )
                ),
                f"{statistics.fmean(r.samples for r in same):,.0f}",
                spread([r.learner_tokens for r in same], "{:,.0f}"),
                spread([r.summary["wall_s"] / 60 for r in same], "{:.1f}"),
                spread(
                    [next((n for n, v in r.curve if v >= level - 1e-9), None) for r in same],
                    "{:,.0f}",
                ),
            )
        )
    return out


def bands(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float]]:
    """(samples, mean, spread) at each point that every curve of (samples, value) has."""
    result = []
    for points in zip(*curves, strict=False):
        values = [p[1] for p in points]
        result.append(
            (
                statistics.fmean(p[0] for p in points),
                statistics.fmean(values),
                statistics.stdev(values) if len(values) > 1 else 0.0,
            )
        )
    return result


def figure(runs: Sequence[Run], title: str) -> Any:
    """Held-out accuracy against samples: mean over seeds as a line, plus and minus one spread.

    Where rewards came from a model, a second panel shows the model's score (dashed) and the gold
    accuracy (solid) of the training answers."""
    from matplotlib.figure import Figure

    judged = any(r.judged for r in runs)
    fig = Figure(figsize=(12 if judged else 7, 4.2), layout="constrained", dpi=110)
    axes = fig.subplots(1, 2 if judged else 1, squeeze=False)[0]
    for i, label in enumerate(sorted({r.label for r in runs})):
        same, color = [r for r in runs if r.label == label], f"C{i}"
        draw(axes[0], [r.curve for r in same], color, label, "-", "o")
        for column, style, what in ((1, "--", "model"), (2, "-", "gold")) if judged else ():
            curves = [[(point[0], point[column]) for point in r.judged] for r in same if r.judged]
            draw(axes[1], curves, color, f"{label}: {what}", style)
    axes[0].set(title=title, xlabel="samples", ylabel="held-out pass@1")
    if judged:
        axes[1].set(
            title="training answers", xlabel="samples", ylabel="reward model's score, gold accuracy"
        )
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    return fig


def draw(
    axis: Any,
    curves: Sequence[Sequence[tuple[float, float]]],
    color: str,
    label: str,
    style: str,
    marker: str = "",
) -> None:
    """Draw one line, the mean of the curves, and its band; nothing where there are no points."""
    if points := bands(curves):
        x, mean, width = (list(column) for column in zip(*points, strict=True))
        axis.plot(x, mean, style, marker=marker, markersize=3, color=color, label=label)
        axis.fill_between(
            x,
            [m - w for m, w in zip(mean, width, strict=True)],
            [m + w for m, w in zip(mean, width, strict=True)],
            color=color,
            alpha=0.15,
        )


def write(folder: Path) -> list[tuple[str, ...]]:
    """Write comparison.md and comparison.png from the finished runs in `folder`.

    Returns the rows of the table. Raises MetricError where there is no finished run."""
    runs = [load(f.parent) for f in sorted(folder.glob("*/summary.json"))]
    if not runs:
        raise MetricError(f"{folder} holds no finished run: give the folder whose folders are runs")
    table = rows(runs)
    lines = [table[0], ("---",) + ("---:",) * (len(table[0]) - 1), *table[1:]]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    write_text(folder / "comparison.md", text)
    with atomic(folder / "comparison.png") as partial:
        figure(runs, folder.resolve().name).savefig(
            partial, format="png", metadata={"Software": None}
        )
    return table


def show(folder: Path) -> None:
    """Write the comparison and print the columns that fit a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    header, *body = write(folder)
    columns = [
        i for i, name in enumerate(header) if name in IN_TERMINAL or name.startswith("samples to")
    ]
    table = Table(
        title=f"{folder}/comparison.md, comparison.png", title_justify="left", box=SIMPLE_HEAD
    )
    for i in columns:
        table.add_column(header[i], justify="right" if i else "left")
    for row in body:
        table.add_row(*(row[i] for i in columns))
    Console().print(table)


# ---- sweeps -------------------------------------------------------------------------------------


def finished(cfg: Any) -> bool:
    """Whether resume=auto has nothing to do: cfg.run_dir holds this run, and it has ended.

    `cfg`: conf.schema.Config."""
    from learner.checkpoints.saved_settings import changes

    folder = Path(cfg.run_dir)
    if cfg.resume != "auto" or not (folder / "summary.json").is_file():
        return False
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    return saved["steps"] == cfg.steps and not changes(cfg, saved)


def conclude(runs: Sequence[tuple[str, int]]) -> int:
    """End a sweep of runs, given as (folder, exit status); returns the exit status of the sweep.

    Compares the runs where all folders have one parent, and names those that failed."""
    parents = {Path(folder).parent for folder, status in runs if status == 0 and folder}
    if len(parents) == 1 and len(runs) > 1:
        (parent,) = parents
        if any(parent.glob("*/summary.json")):  # a preflight writes none
            show(parent)
    failed = [folder or "a run without run_dir" for folder, status in runs if status]
    if failed:
        print(
            f"volley: error: {len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}. Start "
            "the same command again to do only these.",
            file=sys.stderr,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m learner.reports.compare FOLDER")
    try:
        show(Path(sys.argv[1]))
    except MetricError as error:
        sys.exit(f"compare: {error}")
