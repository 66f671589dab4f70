"""How a run stops: what SIGTERM asks for, and the cleaning up after which nothing of the run is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

STOP_S = 11.0  # a run that was interrupted, or is done, is gone after this, whatever hangs
# What the semaphores of this run's reward workers are called: nothing else tells whose they are once their maker and
# Python's own cleaner have been killed, as Ray does when it ends.
SEMAPHORES = f"volley-{uuid.uuid4().hex}"
PARTIAL_FOLDERS = (
    "",
    "checkpoints",
    "rollouts",
)  # below the run's folder: where half-written files may lie


class RunError(RuntimeError):
    """The run cannot go on; the message is for the user and says what to do."""


class Stopping(threading.Event):
    """Set by SIGTERM. While `gently` the trainer is in its loop and ends after the step, with a checkpoint; at any
    other time there is nothing to save, and everything ends at once."""

    gently = False
    run_dir: Path | None = None


def close(run_dir: Path | None, status: int) -> None:
    """End the local cluster (half-started ones too) and whatever our actors started themselves. Where that takes too
    long it is cut short, with the run's own exit status: a run that is done stays done."""
    ignore_signals()
    limit = _force_exit_after(STOP_S, run_dir, status)
    children = psutil.Process().children(recursive=True)
    shared = _shared_files(children)
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    if connected:
        ray.shutdown()
    _end(children, shared, run_dir, 3.0 if connected else 0.0)
    limit.cancel()


def _end(
    processes: list[psutil.Process], shared: set[str], run_dir: Path | None, grace_s: float
) -> None:
    """Kill what has not ended within `grace_s`, then remove what nobody is left to remove."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    shared = shared | _shared_files(alive)
    for process in alive:
        with suppress(psutil.NoSuchProcess):  # gone with its parent, a moment ago
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)
    for file in {*map(Path, shared), *Path("/dev/shm").glob(f"sem.{SEMAPHORES}-*")}:
        file.unlink(missing_ok=True)
    for beside in (
        ()
        if run_dir is None
        else (p for d in PARTIAL_FOLDERS for p in (run_dir / d).glob("*.partial"))
    ):
        shutil.rmtree(beside) if beside.is_dir() else beside.unlink()


def _shared_files(processes: list[psutil.Process]) -> set[str]:
    """Files in /dev/shm that these processes have mapped: semaphores outlive whoever is killed (Linux).

    By inode, since a process that made a semaphore has it mapped under a first name that is gone (sem_open)."""
    inodes: set[int] = set()
    for process in processes:
        with suppress(OSError):  # gone, or no /proc
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            inodes |= {int(i) for i in re.findall(r" (\d+) +/dev/shm/", maps)}
    found: set[str] = set()
    for file in Path("/dev/shm").iterdir() if inodes else ():
        with suppress(FileNotFoundError):
            if file.stat().st_ino in inodes:
                found.add(str(file))
    return found


def ignore_signals() -> None:
    """The cleaning up must not be interrupted; it has a deadline of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def terminate(stopping: Stopping) -> None:
    """SIGTERM: the trainer ends after its step, with a checkpoint; where that takes too long, without one."""
    if stopping.is_set() or not stopping.gently:
        raise KeyboardInterrupt
    stopping.set()
    print("volley: SIGTERM: ending after this step", file=sys.stderr, flush=True)
    _force_exit_after(STOP_S, stopping.run_dir)


def _force_exit_after(seconds: float, run_dir: Path | None, status: int = 130) -> threading.Timer:
    def end() -> None:
        children = psutil.Process().children(recursive=True)
        _end(children, _shared_files(children), run_dir, 0.0)
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
