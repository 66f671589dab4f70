"""`make bench`: train the default recipe once a seed and write what was measured, with command,
commit and machine.

`make bench ARGS="--seeds 0,1,2 steps=20"`; what is not an option is passed to the run. Results go
to benchmarks/results/EXPERIMENT.json and, as a table, EXPERIMENT.md. Runs take turns, or they would
measure each other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURES = ("pass@1", "pass@8", "pass@64", "maj@8", "format", "length")


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = [
            t.partition(":")[2].strip() for t in open("/proc/cpuinfo") if t.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Short hash, with + where the working tree differs from it."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        "+" if git("status", "--porcelain", "-uno") else ""
    )


def train(experiment: str, seed: int, extra: list[str]) -> dict[str, Any]:
    """One run; its summary.json. Raises CalledProcessError where the run fails."""
    run_dir = ROOT / "outputs" / f"bench-{experiment}-seed{seed}-{os.getpid()}"
    command = [
        sys.executable,
        "-m",
        "learner.main",
        f"experiment={experiment}",
        f"seed={seed}",
        f"run_dir={run_dir}",
    ]
    print("bench:", shlex.join(command[1:] + extra), flush=True)
    subprocess.run(command + extra, cwd=ROOT, check=True)
    return json.loads((run_dir / "summary.json").read_text())


def markdown(record: dict[str, Any]) -> str:
    """The record as a table: a row a seed, before -> after in each cell."""
    machine = record["machine"]
    lines = [
        f"`{record['command']}` at {record['commit']}, {machine['cores']} x {machine['cpu']}",
        "",
    ]
    lines += [
        "| seed | " + " | ".join(MEASURES) + " | run | tokens/s |",
        "| --- " * (len(MEASURES) + 3) + "|",
    ]
    for run in record["runs"]:
        cells = []
        for name in MEASURES:
            pair = [run[when].get(name) for when in ("before", "after")]
            digits = 1 if name == "length" else 3
            cells.append(" → ".join("-" if v is None else f"{v:.{digits}f}" for v in pair))
        cells += [f"{run['wall_s']:.0f} s", f"{run['tokens_per_s']:,.0f}"]
        lines.append(f"| {run['seed']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--experiment", default="r1_zero")
    options, extra = parser.parse_known_args(argv)
    record: dict[str, Any] = {
        "command": shlex.join(["make", "run", f"ARGS={' '.join(['seed=SEED', *extra])}"]),
        "commit": commit(), "machine": machine(), "runs": [],
    }  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds.split(","):
        record["runs"].append(train(options.experiment, int(seed), extra))
        (RESULTS / f"{options.experiment}.json").write_text(json.dumps(record, indent=1) + "\n")
        (RESULTS / f"{options.experiment}.md").write_text(markdown(record))
    print(markdown(record))


if __name__ == "__main__":
    main(sys.argv[1:])
