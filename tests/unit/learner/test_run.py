"""Which folder a run goes on in, what SIGTERM means when, and what ends with a run."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from cluster import stopping as stops
from cluster.stopping import RunError, Stopping
from conf.schema import Config
from learner.run import locate

ROOT = Path(__file__).resolve().parents[3]


def test_a_resumed_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    there = tmp_path / "mine"
    (there / "checkpoints" / "step_00002").mkdir(parents=True)
    for given in (there, there / "checkpoints" / "step_00002"):
        assert locate(Config(resume=str(given))) == there
    assert locate(Config(resume=str(there), run_dir=str(tmp_path / "fork"))) == tmp_path / "fork"
    assert locate(Config(resume="auto", run_dir=str(there))) == there


def test_what_lies_elsewhere_goes_on_in_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "bare" / "step_00002").mkdir(parents=True)
    for given in (f"{tmp_path}/bare", f"{tmp_path}/bare/step_00002", "memory://bucket/run"):
        assert locate(Config(resume=given)).parent.name == "outputs"


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunError, match="holds a run already"):
        locate(Config(run_dir=str(tmp_path)))


def test_sigterm_is_gentle_only_in_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(stops, "exit_after", lambda seconds, folder: limits.append(seconds))
    with pytest.raises(KeyboardInterrupt):
        stops.terminate(Stopping())
    stopping = Stopping()
    stopping.gently = True
    stops.terminate(stopping)
    assert (
        stopping.is_set()
        and limits == [stops.STOP_S]
        and "ending after this step" in capsys.readouterr().err
    )
    with pytest.raises(KeyboardInterrupt):  # who asks twice is in a hurry
        stops.terminate(stopping)


SLOW_END = """
import sys, threading, time
from cluster import stopping
from conf.schema import Config
from learner import run

end, stopping.STOP_S, run.attempt = stopping.end_processes, 0.5, lambda *_: int(sys.argv[1])

def hang_in_main_thread(*arguments):
    if threading.current_thread() is threading.main_thread():
        time.sleep(60)
    end(*arguments)

stopping.end_processes = hang_in_main_thread
raise SystemExit(run.execute(Config()))
"""


@pytest.mark.parametrize("status", [0, 1, 130])
def test_an_end_that_hangs_is_cut_short_with_the_runs_own_status(status: int) -> None:
    assert (
        subprocess.run(
            [sys.executable, "-c", SLOW_END, str(status)], cwd=ROOT, timeout=50
        ).returncode
        == status
    )


HOLDER = """
import mmap, multiprocessing, sys, time
file = open(sys.argv[1], "w+b")
file.truncate(4096)
memory = mmap.mmap(file.fileno(), 4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux")
def test_the_end_leaves_no_process_no_shared_memory_and_nothing_half_written(
    tmp_path: Path,
) -> None:
    name = f"/dev/shm/volley-test-{uuid.uuid4().hex}"
    other = Path(f"{name}-other")
    other.touch()
    for beside in ("checkpoints/step_00001.partial", "model.partial"):
        (tmp_path / beside).mkdir(parents=True)
    (tmp_path / "rollouts").mkdir()
    for half in (
        "rollouts/.step_00001.partial",
        "summary.json.partial",
        "checkpoints/step_00001.partial/x",
    ):
        (tmp_path / half).write_text("half")
    (tmp_path / "metrics.jsonl").write_text("whole")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, name], stdout=subprocess.PIPE, text=True
    )
    try:
        semaphore = f"/dev/shm/sem.{child.stdout.readline().strip().lstrip('/')}"
        parent = psutil.Process(child.pid)
        processes = [
            parent,
            *parent.children(recursive=True),
        ]  # Python's own cleaner of semaphores too
        shared = stops.shared_files(processes)
        assert shared == {name, semaphore} and os.path.exists(semaphore)
        stops.end_processes(processes, shared, tmp_path, 0.0)
        assert child.poll() is not None or not processes[0].is_running()
        assert not os.path.exists(name) and not os.path.exists(semaphore) and other.exists()
        assert sorted(p.name for p in tmp_path.rglob("*")) == [
            "checkpoints",
            "metrics.jsonl",
            "rollouts",
        ]
    finally:
        child.kill()
        child.wait()
        other.unlink()
        Path(name).unlink(missing_ok=True)


POOL = """
import time
from reward_service.worker import WorkerContext

lock = WorkerContext().Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux")
def test_semaphores_of_reward_workers_whose_owner_and_cleaner_are_dead_are_known_by_name(
    tmp_path: Path,
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", POOL],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VOLLEY_SEMAPHORES": stops.SEMAPHORES},
    )
    semaphore = Path(f"/dev/shm/sem.{child.stdout.readline().strip().lstrip('/')}")
    for process in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
        process.kill()  # Python's own cleaner first, as Ray does
    child.wait()
    assert semaphore.exists()
    stops.end_processes([], set(), tmp_path, 0.0)
    assert not semaphore.exists()


INTERRUPTED = """
import runpy, signal, sys
from learner import checks

# A shell makes the processes that it runs in the background ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

def validate(cfg):
    exec("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)")

checks.validate = validate
sys.argv = ["learner.main", "experiment=r1_zero"]
runpy.run_module("learner.main", run_name="__main__")
"""


def test_ctrl_c_in_the_middle_of_an_exec_is_told_as_any_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    end = subprocess.run(
        [sys.executable, "-m", "program"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert end.returncode == 130 and "volley: interrupted" in end.stderr, end
