"""Runs of the whole program, started as a user starts them, for the tests of flows and for
`benchmarks.chaos`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests import processes

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 240  # deadline of one run
MARK = "VOLLEY_TEST_RUN"  # in the environment of every process of a run
STEPS, PROMPTS, SIZE = 3, 4, 4
# cosine_length gives rewards that differ inside a group even while every answer is wrong.
SMALL = [
    f"steps={STEPS}",
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.group_size={SIZE}",
    "rollout.max_tokens=72",
    "data.template=short",
    "data.max_prompt_tokens=40",
    "data.heldout_size=4",
    "evaluation.samples=8",
    "+reward.rules.cosine_length=0.5",
    "optimizer.lr=1e-3",
    "generator.threads=1",
    "learner.threads=1",
    "cluster=local",
    "cluster.dashboard=false",
    "logging.rollouts=-1",
    "logging.progress=plain",
]
QUIET = ["logging.wandb=disabled", "logging.report=false"]


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen
    log: Path
    mark: str

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = RUN_S) -> int:
        return self.process.wait(timeout=seconds)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until the condition holds; fail with the run's output if it ends or takes long."""
        deadline = time.monotonic() + RUN_S
        while not (found := condition()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} within {RUN_S} s:\n{self.output}"
            time.sleep(0.02)
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started by this run, whatever became of its parent."""
        return processes.marked(MARK, self.mark)

    def titles(self) -> list[str]:
        """What is alive of this run, as `ps` names it."""
        return [t[:80] for p in self.processes() if (t := processes.title(p))]

    def kill(self) -> None:
        """SIGKILL for everything of this run."""
        processes.kill(self.processes())

    def metrics(self, name: str) -> dict[int, float]:
        file = self.folder / "metrics.jsonl"
        lines = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        return {line["step"]: line[name] for line in lines if name in line}

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def rollouts(self) -> list[pa.Table]:
        return [pq.read_table(p) for p in sorted((self.folder / "rollouts").glob("*.parquet"))]

    def weights(self) -> bytes:
        return (self.folder / "model" / "model.safetensors").read_bytes()


class Starter:
    """Starts runs, each with `settings` before its own, and ends whatever they left when the test
    is over.
    """

    def __init__(
        self, folder: Path, model: str, settings: Sequence[str] = ("experiment=r1_zero", *SMALL)
    ) -> None:
        self.folder, self.model, self.settings, self.runs = folder, model, settings, []

    def __call__(
        self, name: str, *args: str, program: tuple[str, ...] = ("-m", "learner.main")
    ) -> Run:
        mark, log = uuid.uuid4().hex, self.folder / f"{name}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VOLLEY_"))} | {
            MARK: mark
        }
        env["PYTHONPATH"] = str(ROOT)
        command = [
            sys.executable,
            *program,
            *self.settings,
            f"model={self.model}",
            f"run_dir={self.folder / name}",
            *args,
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.runs.append(Run(self.folder / name, process, log, mark))
        return self.runs[-1]

    def close(self) -> None:
        for run in self.runs:
            run.kill()


def generator_process(run: Run) -> psutil.Process | None:
    """The process that holds the vLLM engine, by the title Ray gives it."""
    for p in run.processes():
        title = processes.title(p)
        if (
            title.startswith("ray::") and "Generator" in title
        ):  # its constructor's title names the actor first
            return p
    return None
