"""How a run stops: what SIGTERM asks for, and the clean-up that leaves nothing of it behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from cluster import files

STOP_S = 11.0  # a run that was interrupted or is done has ended after this time, whatever hangs
RAY_END_S = 3.0  # that processes have to end by themselves once Ray has shut down
KILL_S = 2.0  # that killed processes have to disappear
# Name of the semaphores of this run's reward workers. When Ray ends, it kills both their maker and
# Python's own cleaner of semaphores; then nothing but the name tells whose they are.
SEMAPHORES = f"volley-{uuid.uuid4().hex}"
SHARED_MEMORY = Path("/dev/shm")  # of Linux
# Folders in the run's folder where incomplete files may lie (cluster/files.py).
PARTIAL_FOLDERS = ("", "checkpoints", "rollouts")


class RunError(RuntimeError):
    """The run cannot go on. The message is for the user and says what to do."""


class Stopping(threading.Event):
    """An event that SIGTERM sets.

    gently: whether the run is in its loop of steps. SIGTERM then lets the step end and write a
        checkpoint. At any other time there is nothing to save, and SIGTERM ends the run at once.
    run_dir: the folder to clean up, once it is known.
    """

    gently = False
    run_dir: Path | None = None


def close(run_dir: Path | None, status: int) -> None:
    """End the local cluster and every process that the run has started, and remove their remains.

    A cluster whose start was interrupted is ended too. If this takes longer than STOP_S, it is cut
    short and the process exits with the run's own `status`, so that a finished run stays finished.
    """
    ignore_signals()
    timer = exit_after(STOP_S, run_dir, status)
    children = psutil.Process().children(recursive=True)
    shared = shared_files(children)
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    if connected:
        ray.shutdown()
    end_processes(children, shared, run_dir, RAY_END_S if connected else 0.0)
    timer.cancel()


def end_processes(
    processes: list[psutil.Process], shared: set[str], run_dir: Path | None, grace_s: float
) -> None:
    """Kill the processes that have not ended within `grace_s` seconds, and remove their remains.

    shared: files in /dev/shm that they use. run_dir: where incomplete files are removed.
    """
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    shared = shared | shared_files(alive)
    for process in alive:
        with suppress(psutil.NoSuchProcess):  # it has just ended with its parent
            process.kill()
    psutil.wait_procs(alive, timeout=KILL_S)
    for file in {*map(Path, shared), *SHARED_MEMORY.glob(f"sem.{SEMAPHORES}-*")}:
        file.unlink(missing_ok=True)
    if run_dir is None:
        return
    for folder in PARTIAL_FOLDERS:
        for partial in (run_dir / folder).glob(f"*{files.SUFFIX}"):
            files.remove(partial)


def shared_files(processes: list[psutil.Process]) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped (Linux).

    They include semaphores, which remain when a process is killed. Files are compared by inode,
    because the process that makes a semaphore (sem_open) maps it under a first name, which it then
    removes.
    """
    inodes: set[int] = set()
    for process in processes:
        with suppress(OSError):  # the process has ended, or the system has no /proc
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            inodes |= {int(i) for i in re.findall(r" (\d+) +/dev/shm/", maps)}
    if not inodes:
        return set()
    mapped: set[str] = set()
    for file in SHARED_MEMORY.iterdir():
        with suppress(FileNotFoundError):
            if file.stat().st_ino in inodes:
                mapped.add(str(file))
    return mapped


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM, so that they do not interrupt the clean-up. It has a deadline."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def terminate(stopping: Stopping) -> None:
    """Handle SIGTERM: let the run end after its step, with a checkpoint.

    If that takes longer than STOP_S, the process exits without a checkpoint. Raises
    KeyboardInterrupt if no step is going on, or if SIGTERM comes a second time.
    """
    if stopping.is_set() or not stopping.gently:
        raise KeyboardInterrupt
    stopping.set()
    print("volley: SIGTERM: ending after this step", file=sys.stderr, flush=True)
    exit_after(STOP_S, stopping.run_dir)


def exit_after(seconds: float, run_dir: Path | None, status: int = 130) -> threading.Timer:
    """Start a timer that kills the children of this process, removes their remains and exits with
    `status`. Cancel the timer to prevent it."""

    def end() -> None:
        children = psutil.Process().children(recursive=True)
        end_processes(children, shared_files(children), run_dir, 0.0)
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
