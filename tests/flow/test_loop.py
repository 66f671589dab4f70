"""The whole program as a user starts it: `python -m learner.main`, with every engine real and everything small.

One quiet run is the measure of the others: two generators, or one that is killed in the middle, must end bit for bit
where it ended.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests import processes

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 240  # deadline of one run
MARK = "VOLLEY_TEST_RUN"  # in the environment of every process of a run
STEPS, PROMPTS, SIZE = 3, 4, 4
# cosine_length gives rewards that differ inside a group even while every answer is wrong.
SMALL = [
    f"steps={STEPS}", f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={SIZE}", "rollout.max_tokens=72",
    "data.template=short", "data.max_prompt_tokens=40", "data.heldout_size=4", "evaluation.samples=8",
    "+reward.rules.cosine_length=0.5", "optimizer.lr=1e-3", "generator.threads=1", "learner.threads=1",
    "cluster=local", "cluster.dashboard=false", "logging.rollouts=-1", "logging.progress=plain"]  # fmt: skip
QUIET = ["logging.wandb=disabled", "logging.report=false"]
TABLE = {"pass@1", "pass@8", "pass@64", "maj@8", "format", "length"}

pytestmark = pytest.mark.timeout(RUN_S + 60)


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
        """Poll until the condition holds; fails with the run's output if it ends or takes too long."""
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
    """Starts runs, each with `settings` before its own, and ends whatever they left when the test is over."""

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


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Any:
    embedded = ROOT / "actors" / "modeling" / "assets" / "tiny" / "config.json"
    starter = Starter(
        tmp_path_factory.mktemp("loop"), "tiny" if embedded.exists() else str(model_path)
    )
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def quiet(start: Starter) -> Run:
    run = start("quiet", "logging.wandb=disabled")
    assert run.wait() == 0, run.output
    return run


def same_rollouts(one: Run, two: Run) -> None:
    first, second = one.rollouts(), two.rollouts()
    assert len(first) == len(second) == STEPS
    for a, b in zip(first, second, strict=True):
        assert a.equals(b), next(n for n in a.column_names if not a.column(n).equals(b.column(n)))


def same_end(one: Run, two: Run) -> None:
    same_rollouts(one, two)
    assert one.weights() == two.weights()
    for key in ("before", "after", "tokens_generated", "groups"):
        assert one.summary()[key] == two.summary()[key]


# ---- a quiet run ---------------------------------------------------------------------------------------------


def test_summary(quiet: Run) -> None:
    s = quiet.summary()
    assert set(s) == {"experiment", "model", "seed", "steps", "wall_s", "setup_s", "before", "after",
                      "tokens_generated", "tokens_per_s", "sync_logprob_max_abs_diff", "groups"}  # fmt: skip
    assert set(s["before"]) == set(s["after"]) == TABLE
    assert (s["experiment"], s["seed"], s["steps"]) == ("r1_zero", 0, STEPS)
    n = STEPS * PROMPTS
    assert s["groups"] == {"admitted": n, "trained": n, "filtered": 0, "in_flight": 0, "queued": 0}
    assert 0 < s["setup_s"] < s["wall_s"] and s["tokens_per_s"] > 0
    assert s["tokens_generated"] == sum(
        sum(t.column("length").to_pylist()) for t in quiet.rollouts()
    )
    assert 0 < s["sync_logprob_max_abs_diff"] < 1e-4
    for moment in ("before", "after"):
        table = s[moment]
        assert table["pass@64"] is None  # 8 samples cannot tell
        assert all(0 <= table[k] <= 1 for k in ("pass@1", "pass@8", "maj@8", "format"))
        assert table["pass@1"] <= table["pass@8"] and 1 <= table["length"] <= 72


def test_metrics_and_config(quiet: Run) -> None:
    norms, versions = quiet.metrics("actor/grad_norm"), quiet.metrics("training/policy_version")
    assert all(norms[s] > 0 for s in range(1, STEPS + 1)), (
        "nothing was trained, so nothing below is proved"
    )
    assert [versions[s] for s in range(1, STEPS + 1)] == [1, 2, 3]
    for name in ("training/rollout_logprob_diff/max", "sync/logprob_max_abs_diff"):
        found = quiet.metrics(name)
        assert len(found) == STEPS and all(0 <= v < 1e-4 for v in found.values())
    assert set(quiet.metrics("training/staleness/max").values()) == {0}
    assert set(quiet.metrics("eval/pass@1")) == {0, STEPS}
    assert all(math.isfinite(v) for v in quiet.metrics("actor/kl_loss").values())
    assert quiet.metrics("generator/restarts")[STEPS] == 0
    config = yaml.safe_load((quiet.folder / "config.yaml").read_text())
    assert config["rollout"]["group_size"] == SIZE and config["algorithm"]["name"] == "grpo"


def test_rollouts_are_decoded_and_complete(quiet: Run) -> None:
    for step, table in enumerate(quiet.rollouts(), 1):
        rows = table.to_pylist()
        assert len(rows) == PROMPTS * SIZE
        assert {r["step"] for r in rows} == {step} and {r["version"] for r in rows} == {step - 1}
        ids = [(r["group_id"], r["sample_index"]) for r in rows]
        assert ids == [
            (g, i) for g in range((step - 1) * PROMPTS, step * PROMPTS) for i in range(SIZE)
        ]
        for r in rows:
            assert r["status"] == "ok" and r["finish_reason"] in ("stop", "length")
            assert isinstance(r["completion"], str) and 1 <= r["length"] <= 72
            assert "<eos>" not in r["completion"] and "<pad>" not in r["prompt"]
        for g in {r["group_id"] for r in rows}:  # GRPO's advantage from the rewards in the file
            group = [r for r in rows if r["group_id"] == g]
            rewards = np.array([r["reward"] for r in group])
            wanted = (
                (rewards - rewards.mean()) / rewards.std() if rewards.std() > 1e-9 else 0 * rewards
            )
            np.testing.assert_allclose([r["advantage"] for r in group], wanted, atol=1e-9)


def test_the_saved_model_loads_and_moved(quiet: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = quiet.folder / "model"
    after = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    config = yaml.safe_load((quiet.folder / "config.yaml").read_text())
    before = AutoModelForCausalLM.from_pretrained(config["model"]["path"], use_safetensors=True)
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(after.parameters(), before.parameters(), strict=True)
    )
    assert 0 < moved < 0.1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<think>1+2=3</think>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "<think>1+2=3</think>"


def test_output_is_short_and_nothing_is_left(quiet: Run) -> None:
    text = quiet.output
    assert "Traceback" not in text and "rror" not in text, text
    assert len(text.splitlines()) < 60, text
    assert f"results in {quiet.folder}" in text
    assert (quiet.folder / "report.html").is_file()
    assert quiet.processes() == []


def test_a_folder_that_holds_a_run_is_refused(start: Starter, quiet: Run) -> None:
    before = (quiet.folder / "summary.json").read_bytes()
    again = start("again", f"run_dir={quiet.folder}")
    assert again.wait(60) == 1
    assert "holds a run already" in again.output and "Traceback" not in again.output
    assert (quiet.folder / "summary.json").read_bytes() == before


# ---- runs that must end where the quiet one did --------------------------------------------------------------


def test_two_generators_give_the_same_run(start: Starter, quiet: Run) -> None:
    run = start("two", *QUIET, "generator.count=2")
    assert run.wait() == 0, run.output
    same_end(quiet, run)


def generator_process(run: Run) -> psutil.Process | None:
    """The process that holds the vLLM engine, by the title Ray gives it."""
    for p in run.processes():
        title = processes.title(p)
        if (
            title.startswith("ray::") and "Generator" in title
        ):  # its constructor's title names the actor first
            return p
    return None


def test_a_generator_killed_in_a_step_changes_nothing(start: Starter, quiet: Run) -> None:
    """Same settings and seed as the quiet run: this is the second of two identical runs too."""
    run = start("killed", *QUIET)
    victim = run.until(lambda: generator_process(run), "generator")
    run.until(lambda: 1 in run.metrics("reward/mean"), "first step")
    victim.send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert run.metrics("generator/restarts")[STEPS] == 1
    same_end(quiet, run)
    assert "Traceback" not in run.output, run.output
    assert run.processes() == []


def test_a_driver_killed_and_resumed_ends_where_the_quiet_run_did(
    start: Starter, quiet: Run
) -> None:
    args = [*QUIET, "checkpoint.every=1", "resume=auto"]
    run = start("resumed", *args)  # resume=auto where there is nothing yet starts anew
    run.until(
        lambda: (run.folder / "checkpoints" / "step_00001" / "manifest.json").exists(),
        "first checkpoint",
    )
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(timeout=30)
    again = start("resumed", *args)
    assert again.wait() == 0, again.output
    assert "going on after step" in again.output
    same_end(quiet, again)
    versions = again.metrics("training/policy_version")
    assert [versions[s] for s in range(1, STEPS + 1)] == [1, 2, 3]


# ---- off-policy, several updates, filters, and a step that is not finite -------------------------------------

POISON = """
import dataclasses, sys
import numpy as np, pyarrow as pa
from cluster import security
security.secure_local_cluster()  # before Ray is imported, with the trainer
from learner import main, trainer
from learner.algorithms.assemble import Assembled

real, calls = trainer.Trainer.update, []

def poisoned(batch):
    i = batch.plan.schema.names.index("advantage")
    nan = pa.array(np.full(batch.plan.num_rows, np.nan))
    return dataclasses.replace(batch, plan=batch.plan.set_column(i, batch.plan.schema.field(i), nan))

def update(self, *args):
    calls.append(1)
    if len(calls) == 2:
        args = [poisoned(a) if isinstance(a, Assembled) and a.plan is not None else a for a in args]
    return real(self, *args)

trainer.Trainer.update = update
raise SystemExit(main.main(sys.argv[1:]))
"""


def test_off_policy_run_with_a_poisoned_step(start: Starter, tmp_path: Path) -> None:
    """One version behind, two optimizer steps a batch, dead groups left out, no reference; the second batch is nan."""
    program = tmp_path / "poisoned.py"
    program.write_text(POISON)
    run = start(
        "off_policy",
        "rollout.max_staleness=1",
        "algorithm.tis_cap=2",
        "learner.updates_per_batch=2",
        "algorithm.filter=skip_dead",
        "algorithm.beta=0",
        "logging.wandb=offline",
        "logging.report=false",
        program=(str(program),),
    )
    assert run.wait() == 0, run.output
    groups = run.summary()["groups"]
    assert (
        groups["admitted"]
        == groups["trained"] + groups["filtered"] + groups["in_flight"] + groups["queued"]
    )
    assert groups["trained"] + groups["filtered"] == STEPS * PROMPTS and groups["trained"] > 0
    assert groups["admitted"] == (STEPS + 1) * PROMPTS  # one step ahead, and no more
    for step in range(1, STEPS + 1):
        books = {k: run.metrics(f"groups/{k}")[step] for k in groups}
        assert books["admitted"] == sum(v for k, v in books.items() if k != "admitted")
    staleness = run.metrics("training/staleness/max")
    assert staleness[1] == 0 and max(staleness.values()) == 1
    skipped, versions = run.metrics("actor/skipped_steps"), run.metrics("training/policy_version")
    assert skipped[1] == 0 and skipped[2] == 2 and skipped[3] == 0
    assert (
        versions[1] == 1 and versions[2] == 1 and versions[3] == 2
    )  # a skipped step publishes nothing
    assert run.metrics("actor/tis_weight/max")[1] <= 2
    assert run.metrics("actor/ratio/max")[1] > 1 + 1e-6  # the second optimizer step of the batch
    for table in run.rollouts():
        dead = [r for r in table.to_pylist() if r["advantage"] == 0]
        assert (
            all(math.isfinite(r["advantage"]) for r in table.to_pylist())
            and len(dead) < table.num_rows
        )
    assert list((run.folder / "wandb").glob("offline-run-*"))
    assert run.processes() == []
