"""Resume: a run killed again and again ends bit for bit where the uninterrupted one does; ranks,
ZeRO stage and generators may change; damaged checkpoints are refused by name before anything
starts.

`VOLLEY_TEST_KILLS=10` (default 5) is how often the driver is killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.runs import QUIET, ROOT, RUN_S, Run, Starter

STEPS, SEED, KILLS = 4, 282, int(os.environ.get("VOLLEY_TEST_KILLS", "5"))
# Moments of a step; the first five are hit in every chain. The last three are inside a checkpoint:
# a tensor file is half-written; all is written and nothing renamed; it is there and the older ones
# have not gone.
MOMENTS = ("gen", "reward", "update", "sync", "tensors", "ref", "commit", "prune")
ARGS = [
    *QUIET,
    f"steps={STEPS}",
    "checkpoint.every=1",
    "data.heldout_size=2",
    "evaluation.samples=4",
    "evaluation.every=2",
    "evaluation.samples_during=2",
]

pytestmark = [pytest.mark.timeout(2 * RUN_S + 60), pytest.mark.slow]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    assert (ROOT / "actors" / "modeling" / "assets" / "tiny" / "config.json").is_file()
    starter = Starter(tmp_path_factory.mktemp("resume"), "tiny")
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def quiet(start: Starter) -> Run:
    run = start("quiet", *ARGS, "checkpoint.keep=0")
    assert run.wait() == 0, run.output
    return run


def checkpoints(run: Run) -> list[str]:
    return sorted(p.name for p in (run.folder / "checkpoints").iterdir())


def step_files(step: int) -> str:
    return f"step_{step:05d}"


def like(quiet: Run, folder: Path, *steps: int) -> Path:
    """A copy of the run's folder that holds only these of its checkpoints."""
    shutil.copytree(
        quiet.folder, folder, ignore=shutil.ignore_patterns("checkpoints", "model", "summary.json")
    )
    for step in steps:
        shutil.copytree(
            quiet.folder / "checkpoints" / step_files(step),
            folder / "checkpoints" / step_files(step),
        )
    return folder


def assert_same(one: Run, two: Run, first: int = 1) -> None:
    """Bit for bit: weights, optimizer state, every rollout from step `first` on, what was evaluated
    and counted.
    """
    for a, b in zip(
        one.rollouts()[first - 1 :], two.rollouts()[-(STEPS - first + 1) :], strict=True
    ):
        ours, theirs = (
            {n: repr(c) for n, c in t.to_pydict().items()} for t in (a, b)
        )  # repr: nan is nan
        assert ours == theirs, [n for n in ours if ours[n] != theirs[n]]
    assert one.weights() == two.weights()
    for key in ("before", "after", "tokens_generated", "groups"):
        assert one.summary()[key] == two.summary()[key], key
    for name in (
        "reward/mean",
        "actor/loss",
        "actor/grad_norm",
        "training/policy_version",
        "eval/pass@1",
        "eval/length",
    ):
        ours, theirs = one.metrics(name), two.metrics(name)
        assert theirs == {s: v for s, v in ours.items() if s >= first or s in theirs} and theirs, (
            name
        )


# ---- killed at seeded moments --------------------------------------------------------------------

# The program as it is, but for a bullet. A file beside it says where it struck.
KILLER = """
import os, random, signal, sys, threading, time
from contextlib import contextmanager
from pathlib import Path
from cluster import security
security.secure_local_cluster()  # before Ray is imported, with the stages
from dataclasses import replace
from learner import main
from learner.checkpoints.checkpoint import Store
from learner.stages import table
from learner.stages.rl.clock import Clock

mark, moment, step, delay = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
note = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
stage, current = table.STAGES["rl"], []

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at(name):
    number = current[0].done + (name in FOR_NEXT)
    os.pwrite(note, f"{number} {name:<20}".encode(), 0)
    if name == moment and number == step:
        threading.Timer(delay, die).start() if delay else die()

# `done` is counted up before the checkpoint.
FOR_NEXT = ("gen", "reward", "ref", "adv", "update", "sync")
phase, commit, prune = Clock.phase, Store.commit, Store.prune

def watched_step(run, state, number):
    current[:] = [state]
    stage.step(run, state, number)

@contextmanager
def watched(self, name):
    at(name)
    with phase(self, name):
        yield
    os.pwrite(note, f"{current[0].done + 1} after {name:<14}".encode(), 0)

def half_saved(run, state, folder):
    stage.save(run, state, folder)
    if moment == "tensors" and state.done == step:
        file = folder / "policy.safetensors"
        os.truncate(file, file.stat().st_size // 2)
    at("tensors")

def before(name, real):
    def call(self, *args):
        at(name)
        return real(self, *args)
    return call

table.STAGES["rl"] = replace(stage, step=watched_step, save=half_saved)
Clock.phase, Store.commit, Store.prune = watched, before("commit", commit), before("prune", prune)
raise SystemExit(main.main(sys.argv[5:]))
"""


def schedule(kills: int, seconds: dict[str, float]) -> list[tuple[str, int, float]]:
    """(moment, step, seconds after it began) of each kill, from SEED; steps never go back behind a
    checkpoint.
    """
    rng = random.Random(SEED)
    chosen = [*MOMENTS[:5], *(rng.choice(MOMENTS) for _ in range(kills - 5))]
    rng.shuffle(chosen)
    out, step = [], 1
    for i, moment in enumerate(chosen):
        left = len(chosen) - i
        step += rng.random() < (STEPS - step) / left  # now and then a whole step is done in between
        moment = (
            "commit" if moment == "prune" and step == STEPS else moment
        )  # after it nothing would be left to do
        out.append((moment, step, round(rng.uniform(0, 0.4) * seconds.get(moment, 0.0), 3)))
        step += moment == "prune"  # that step's checkpoint is there
    return out


@pytest.mark.timeout((KILLS + 2) * 120)
def test_killed_at_seeded_moments_ends_bit_identical(
    start: Starter, quiet: Run, tmp_path: Path
) -> None:
    program, mark = tmp_path / "killer.py", tmp_path / "moment"
    program.write_text(KILLER)
    timing = {
        m: min(quiet.metrics(f"timing_s/{m}").values())
        for m in ("gen", "reward", "ref", "update", "sync")
    }
    plan = schedule(KILLS, {m: s for m, s in timing.items() if s > 0.05})
    hit, partial = [], []
    for moment, step, delay in plan:
        run = start(
            "killed",
            *ARGS,
            "resume=auto",
            "evaluation.samples=4",
            program=(str(program), str(mark), moment, str(step), str(delay)),
        )
        assert run.wait() == -9, run.output
        hit.append(mark.read_text().split(maxsplit=1))
        if run.folder.joinpath("checkpoints").is_dir():
            partial.append([c for c in checkpoints(run) if c.endswith(".partial")])
        deadline = time.monotonic() + 30  # the raylet and its workers notice by themselves
        while left := run.titles():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    print("killed at", [(int(s), m.strip()) for s, m in hit])
    assert [(m.strip(), int(s)) for s, m in hit] == [(m, s) for m, s, _ in plan]
    assert any(partial), "no kill in the middle of a checkpoint"
    last = start("killed", *ARGS, "resume=auto")
    assert last.wait() == 0, last.output
    assert_same(quiet, last)
    assert checkpoints(last) == [step_files(STEPS - 1), step_files(STEPS)]
    for name in ("policy.safetensors",):
        same = [
            (r.folder / "checkpoints" / step_files(STEPS) / name).read_bytes()
            for r in (quiet, last)
        ]
        assert same[0] == same[1], f"{name} of the last checkpoint"


# ---- other ranks, other ZeRO stages, damaged checkpoints in between ------------------------------


def test_resumes_with_other_ranks_stage_and_generators_past_two_damaged_checkpoints(
    start: Starter, quiet: Run
) -> None:
    folder = like(quiet, start.folder / "spread", 2, 3, 4)
    flipped = folder / "checkpoints" / step_files(3) / "policy.safetensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    (folder / "checkpoints" / step_files(4) / "policy.safetensors").unlink()
    run = start(
        "spread",
        *ARGS,
        "resume=auto",
        "learner.ranks=2",
        "learner.zero_stage=3",
        "generator.count=2",
    )
    assert run.wait() == 0, run.output
    said = [line for line in run.output.splitlines() if "trying the one before it" in line]
    assert len(said) == 2, run.output
    assert "step_00004: policy.safetensors is missing" in said[0]
    assert "step_00003: policy.safetensors does not match its checksum" in said[1]
    assert "going on after step 2" in run.output
    assert run.rollouts()[2].equals(quiet.rollouts()[2])
    for name in ("actor/loss", "actor/kl_loss", "actor/entropy"):
        assert run.metrics(name)[3] == pytest.approx(quiet.metrics(name)[3], abs=1e-5), name
    assert run.metrics("actor/grad_norm")[3] == pytest.approx(
        quiet.metrics("actor/grad_norm")[3], rel=1e-4
    )
    books = run.summary()["groups"]
    assert books == quiet.summary()["groups"] and run.processes() == []


def test_resumes_with_zero_2_on_two_ranks(start: Starter, quiet: Run) -> None:
    like(quiet, start.folder / "two", 3)
    run = start("two", *ARGS, "resume=auto", "learner.ranks=2", "learner.zero_stage=2")
    assert run.wait() == 0, run.output
    assert run.rollouts()[3].equals(quiet.rollouts()[3])
    assert run.metrics("actor/loss")[4] == pytest.approx(quiet.metrics("actor/loss")[4], abs=1e-5)


def ppo_checkpoints(start: Starter) -> Path:
    """Where fsspec's "dir" puts what goes to dir::file://FOLDER: below FOLDER, under FOLDER's own
    path.
    """
    return Path(f"{start.folder}/away{start.folder}/away")


@pytest.fixture(scope="module")
def ppo(start: Starter) -> Run:
    """PPO: a critic with an optimizer of its own, and checkpoints where nothing can be renamed."""
    run = start(
        "ppo",
        *ARGS,
        "algorithm=ppo",
        f"checkpoint.folder=dir::file://{start.folder}/away",
        "checkpoint.keep=0",
    )
    assert run.wait() == 0, run.output
    return run


def test_ppo_resumes_bit_for_bit_from_an_address(start: Starter, ppo: Run) -> None:
    away = ppo_checkpoints(start)
    assert sorted(p.name for p in away.iterdir()) == [step_files(s) for s in range(1, STEPS + 1)]
    assert sorted(p.name for p in (away / step_files(2)).iterdir()) == [
        "critic.safetensors",
        "manifest.json",
        "policy.safetensors",
        "trainer.json",
    ]
    assert not list(ppo.folder.rglob("step_*.partial"))
    run = start(
        "ppo-again",
        *ARGS,
        "algorithm=ppo",
        f"resume=dir::file://{start.folder}/away/{step_files(2)}",
        "checkpoint.keep=0",
    )
    assert run.wait() == 0, run.output
    assert_same(ppo, run, first=3)
    assert not (run.folder / "checkpoints.fetched").exists()
    for name in ("policy.safetensors", "critic.safetensors"):
        theirs = (run.folder / "checkpoints" / step_files(STEPS) / name).read_bytes()
        assert theirs == (away / step_files(STEPS) / name).read_bytes(), name


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 0), (2, 2), (3, 3)])
def test_weights_and_moments_are_those_saved(
    cluster: None, ppo: Run, start: Starter, tmp_path: Path, ranks: int, stage: int
) -> None:
    from safetensors.numpy import load_file

    from learner.engine.group import LearnerGroup
    from learner.main import load

    saved = ppo_checkpoints(start) / step_files(3)
    cfg = load(
        [
            "experiment=r1_zero",
            "algorithm=ppo",
            "model=tiny",
            f"learner.ranks={ranks}",
            f"learner.zero_stage={stage}",
            "learner.cpus=0",
            "learner.threads=1",
            "rollout.prompts_per_step=6",
        ]
    )
    group = LearnerGroup(cfg)
    try:
        group.start(str(saved))
        group.save_state(str(tmp_path))
    finally:
        group.stop()
    for name in ("policy.safetensors", "critic.safetensors"):
        before, after = load_file(saved / name), load_file(tmp_path / name)
        assert before.keys() == after.keys() and before["step"] == 3
        assert any(k.startswith("exp_avg_sq/") and v.any() for k, v in before.items())
        for key, value in before.items():
            assert value.dtype == after[key].dtype and value.tobytes() == after[key].tobytes(), (
                name,
                key,
            )


# ---- what is refused, before anything starts -----------------------------------------------------


def refused(run: Run, *said: str) -> None:
    began = time.monotonic()
    assert run.wait(90) == 1, run.output
    assert "Ray cluster" not in run.output and "Traceback" not in run.output, run.output
    assert [e for e in run.output.splitlines() if "volley: error:" in e][
        -1:
    ] and not run.processes()
    for text in said:
        assert text in run.output, run.output
    print(f"refused after {time.monotonic() - began:.1f} s")


def test_all_damaged_is_one_error_and_nothing_starts(start: Starter, quiet: Run) -> None:
    folder = like(quiet, start.folder / "damaged", 3, 4)
    file = folder / "checkpoints" / step_files(4) / "policy.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    (folder / "checkpoints" / step_files(3) / "manifest.json").unlink()
    before = {p: p.read_bytes() for p in (folder / "config.yaml", folder / "metrics.jsonl")}
    run = start("damaged", *ARGS, "resume=auto", "logging.progress=off")
    refused(
        run,
        f"{step_files(4)}: policy.safetensors has",
        f"{step_files(3)}: no readable manifest.json",
        "volley: error: resume=auto: no usable checkpoint in",
    )
    assert {p: p.read_bytes() for p in before} == before, "a refused resume changed the run's files"


def test_changed_settings_are_listed_and_nothing_starts(start: Starter, quiet: Run) -> None:
    folder = like(quiet, start.folder / "changed", 3)
    before = (folder / "config.yaml").read_bytes()
    run = start(
        "changed",
        *ARGS,
        "resume=auto",
        "optimizer.lr=5e-4",
        "rollout.temperature=0.9",
        "generator.count=2",
    )
    refused(
        run,
        "was written with other settings",
        "rollout.temperature: 1.0 -> 0.9; optimizer.lr: 0.001 -> 0.0005",
        "allow_changes=true",
    )
    assert "generator.count" not in run.output and (folder / "config.yaml").read_bytes() == before


def test_the_last_checkpoint_says_what_the_run_did(quiet: Run) -> None:
    for step in range(1, STEPS + 1):
        folder = quiet.folder / "checkpoints" / step_files(step)
        state: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
        assert (
            state["done"] == step
            and state["metrics"]["reward/mean"] == quiet.metrics("reward/mean")[step]
        )
        assert ("eval/pass@1" in state["metrics"]) == (step % 2 == 0 and step < STEPS)
    assert set(quiet.metrics("eval/pass@1")) == {0, 2, STEPS}
