"""A run whose processes are killed or stopped, one kind after the other, ends where the quiet run
does, bit for bit.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import ARGS, KINDS, differences, last_step, replaced, strike, torment
from tests.flow.runs import RUN_S, Run, Starter

STEPS, SEED = 12, 5
SHORT = [
    "data.heldout_size=2",
    "evaluation.samples=4",
    "algorithm.reference_reset_every=4",
    "algorithm.exact_kl_tokens=8",
]

pytestmark = [pytest.mark.timeout(2 * RUN_S + 60), pytest.mark.slow]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("chaos"), "tiny")
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def quiet(start: Starter) -> Run:
    run = start("quiet", *ARGS, *SHORT, f"steps={STEPS}")
    assert run.wait() == 0, run.output
    assert all(v > 0 for v in run.metrics("actor/grad_norm").values()), (
        "nothing is trained, so nothing is proved"
    )
    return run


def ended_well(run: Run) -> None:
    assert run.wait() == 0, run.output
    assert "Traceback" not in run.output, run.output
    assert run.processes() == []


def test_every_kind_of_process_killed(start: Starter, quiet: Run) -> None:
    rng = random.Random(SEED)
    # The writer's death is noticed when it has to have written, the last time at the end.
    kinds = [
        *rng.sample([k for k in KINDS if k != "rollout_writer"], len(KINDS) - 1),
        "rollout_writer",
    ]
    run = start("killed", *ARGS, *SHORT, f"steps={STEPS}", "checkpoint.every=3")
    torment(run, kinds, rng)
    ended_well(run)
    print(f"killed in this order: {', '.join(kinds)}; replaced: {dict(replaced(run))}")
    assert replaced(run) == {
        "generator-0": 1,
        "learner": 1,
        "reference-0": 1,
        "rewards": 1,
        "rollout-writer": 1,
    }
    for role in ("generator", "learner", "reference", "rewards"):
        assert run.metrics(f"{role}/restarts")[STEPS] == 1
    assert differences(quiet, run) == []
    assert run.summary()["groups"]["trained"] == STEPS * 4


@pytest.mark.parametrize(
    "kind,setting",
    [
        ("generator", "cluster.probe_timeout_s=6"),
        ("rewards", "cluster.probe_timeout_s=6"),
        ("learner", "learner.timeout_s=40"),
    ],
)
def test_one_that_hangs_is_replaced_within_its_deadline(
    start: Starter, quiet: Run, kind: str, setting: str
) -> None:
    steps = 3
    run = start(f"hung_{kind}", *ARGS, *SHORT, f"steps={steps}", setting)
    run.until(lambda: last_step(run) == 1, "first step")
    victim, began = strike(run, kind, random.Random(SEED), signal.SIGSTOP), time.monotonic()
    run.until(
        lambda: " is lost (DeadlineExceeded" in run.output or "is lost (LearnerLost" in run.output,
        "word of it",
    )
    took = time.monotonic() - began
    print(f"{kind}: stopped, found after {took:.1f} s")
    assert took < float(setting.partition("=")[2]) + 10  # the rest of the phase that was under way
    ended_well(run)
    assert not psutil.pid_exists(victim.pid)
    assert sum(replaced(run).values()) == 1
    for ours, theirs in zip(run.rollouts(), quiet.rollouts()[:steps], strict=True):
        assert ours.equals(theirs)


def test_a_learner_lost_before_the_first_checkpoint_begins_again(
    start: Starter, quiet: Run
) -> None:
    steps = 3
    run = start("no_checkpoint", *ARGS, *SHORT, f"steps={steps}", "checkpoint.every=0")
    run.until(lambda: last_step(run) == 2, "second step")
    strike(run, "learner", random.Random(SEED))
    ended_well(run)
    assert "going on after step 0" in run.output and replaced(run) == {"learner": 1}
    assert run.metrics("training/policy_version") == {1: 1, 2: 2, 3: 3}
    for ours, theirs in zip(run.rollouts(), quiet.rollouts()[:steps], strict=True):
        assert ours.equals(theirs)
    assert run.summary()["before"] == quiet.summary()["before"]


def test_a_rank_of_two_lost_while_generation_runs_ahead(start: Starter) -> None:
    """Groups under way at the loss belong to steps that are made again: each is trained once,
    whoever finished it.
    """
    steps = 6
    run = start(
        "ahead",
        *ARGS,
        *SHORT,
        f"steps={steps}",
        "checkpoint.every=2",
        "learner.ranks=2",
        "rollout.max_staleness=1",
        "algorithm.tis_cap=2",
    )
    run.until(lambda: last_step(run) == 3, "third step")
    strike(run, "learner", random.Random(SEED))
    ended_well(run)
    assert "going on after step 2" in run.output and replaced(run) == {"learner": 1}
    books = run.summary()["groups"]
    assert books["trained"] == steps * 4 and books["admitted"] == sum(
        n for k, n in books.items() if k != "admitted"
    )
    trained = [set(table.column("group_id").to_pylist()) for table in run.rollouts()]
    assert [len(groups) for groups in trained] == [4] * steps and len(
        set().union(*trained)
    ) == steps * 4
    assert max(run.metrics("training/staleness/max").values()) == 1


def test_a_learner_lost_more_often_than_allowed_ends_the_run(start: Starter) -> None:
    run = start("exhausted", *ARGS, *SHORT, "steps=1000", "learner.restarts=0")
    run.until(lambda: last_step(run) == 1, "first step")
    strike(run, "learner", random.Random(SEED))
    assert run.wait() == 1
    assert "learner.restarts=0" in run.output and "Traceback" not in run.output, run.output
    assert (Path(run.folder) / "checkpoints").is_dir() and run.processes() == []
