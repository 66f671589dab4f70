"""SIGINT and SIGTERM at any moment: gone within 15 s, with no process, shared-memory file or
half-written file left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.stopping import shared_files
from learner.checkpoints import checkpoint
from tests.flow.runs import QUIET, RUN_S, Run, Starter, generator_process

LIMIT_S = 15.0

pytestmark = pytest.mark.timeout(RUN_S + 60)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("shutdown"), "tiny")
    yield starter
    starter.close()


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Whatever is new in /dev/shm when a test ends must be in use by another program."""
    before = set(Path("/dev/shm").iterdir())
    yield
    used = shared_files([*psutil.process_iter()])
    left = [p.name for p in set(Path("/dev/shm").iterdir()) - before if str(p) not in used]
    assert not left, left


def interrupted(run: Run, how: signal.Signals, whole_group: bool) -> None:
    """Send the signal, as a terminal does (to the whole group) or as `kill` does; the run must be
    gone in time.
    """
    began = time.monotonic()
    (os.killpg if whole_group else os.kill)(run.process.pid, how)
    status = run.wait(60)
    while run.processes() and time.monotonic() - began < 60:
        time.sleep(0.1)
    took = time.monotonic() - began
    left = run.titles()
    assert not left and took < LIMIT_S, (took, left, run.output)
    assert status == 130, run.output
    assert "Traceback" not in run.output, run.output
    assert "volley: interrupted" in run.output
    assert not [*run.folder.rglob("*.partial")]
    print(f"gone {took:.1f} s after {how.name}")


BOTH = pytest.mark.parametrize(
    ("how", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["ctrl_c", "sigterm"]
)


def process(run: Run, name: str) -> psutil.Process | None:
    for p in run.processes():
        try:
            if p.name() == name:
                return p
        except psutil.NoSuchProcess:
            continue
    return None


def test_ctrl_c_before_anything_started(start: Starter) -> None:
    run = start("early", *QUIET)
    run.until(lambda: "volley: r1_zero ->" in run.output, "first line")
    interrupted(run, signal.SIGINT, True)


@pytest.mark.parametrize(
    ("name", "how", "group"),
    [
        pytest.param("gcs_server", signal.SIGINT, True, id="gcs_server-ctrl_c"),
        pytest.param("raylet", signal.SIGTERM, False, id="raylet-sigterm"),
        pytest.param(
            "gcs_server", signal.SIGTERM, False, id="gcs_server-sigterm", marks=pytest.mark.slow
        ),
        pytest.param("raylet", signal.SIGINT, True, id="raylet-ctrl_c", marks=pytest.mark.slow),
    ],
)
def test_while_ray_starts(start: Starter, name: str, how: signal.Signals, group: bool) -> None:
    run = start(f"{name}-{how.name}", *QUIET)
    run.until(lambda: process(run, name), name)
    assert "Ray cluster" not in run.output, "Ray has started already"
    interrupted(run, how, group)


@pytest.mark.slow
@BOTH
def test_while_engines_start(start: Starter, how: signal.Signals, group: bool) -> None:
    run = start(f"engines-{how.name}", *QUIET)
    run.until(lambda: generator_process(run), "generator")
    time.sleep(2)
    interrupted(run, how, group)


def test_ctrl_c_in_the_middle_of_a_step(start: Starter) -> None:
    run = start("middle", *QUIET, "steps=1000")
    run.until(lambda: 1 in run.metrics("reward/mean"), "first step")
    time.sleep(0.7)
    interrupted(run, signal.SIGINT, True)


def test_sigterm_in_the_loop_ends_after_the_step_with_a_checkpoint(start: Starter) -> None:
    run = start("term", *QUIET, "steps=1000")
    run.until(lambda: 1 in run.metrics("reward/mean"), "first step")
    interrupted(run, signal.SIGTERM, False)
    assert "volley: SIGTERM: ending after this step" in run.output
    store = checkpoint.Store(str(run.folder / "checkpoints"), run.folder)
    last = max(run.metrics("reward/mean"))
    assert store.steps() == {last: True} and store.newest(pytest.fail) is not None
