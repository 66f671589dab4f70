"""A scoring process of the pool: how it starts, what it runs, and how it and its children are
killed.

Workers are forked from the fork server of multiprocessing, an interpreter with one thread that has
already imported the modules a worker needs. Therefore a killed worker is replaced within
milliseconds, and the calling process, which may be an actor with many threads, is never forked.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from reward_service.rules.item import RewardItem, RewardResult
from reward_service.rules.scorer import Scorer, score_safely

_START = threading.Lock()
_IMPORTS = ["mpmath", "pebble", "reward_service.rules.tasks", "reward_service.worker"]
_scorer: Scorer | None = None
_problem: str | None = None


def kill_group(pid: int | None) -> None:
    """Sends SIGKILL to a worker and to every process it started."""
    # A worker that has not yet become the leader of a process group is killed by its own id.
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, TypeError):
            return kill(pid, signal.SIGKILL)


class _Process(ForkServerProcess):
    def start(self) -> None:
        """Starts the process without the caller's script.

        multiprocessing would make every worker import that script, which under Ray imports Ray.
        """
        with _START:
            script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = script

    def terminate(self) -> None:
        """Kills the process and its children with SIGKILL; code that hangs may ignore SIGTERM."""
        kill_group(self.pid)


class WorkerContext(ForkServerContext):
    """The multiprocessing context of the pool. It starts the fork server if none is running."""

    Process = _Process

    def __init__(self) -> None:
        super().__init__()
        path = filter(
            None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
        )
        ours = {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
        }  # its complaint when the caller is killed
        if name := os.environ.get(
            "VOLLEY_SEMAPHORES"
        ):  # of a run that removes them if nobody else does
            multiprocessing.current_process()._config["semprefix"] = f"/{name}"
        with _START:
            before = {name: os.environ.get(name) for name in ours}
            os.environ.update(ours)
            try:
                self.set_forkserver_preload(_IMPORTS)
                forkserver.ensure_running()
            finally:
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})


def _exit_with_parent() -> None:
    """Kills this worker and its children when the process that started it ends."""
    multiprocessing.parent_process().join()
    kill_group(os.getpid())


def start(cfg: Mapping[str, Any]) -> None:
    """Initialises a worker: its process group, its memory limit (GiB), and its scorer for `cfg`."""
    global _scorer, _problem
    os.setsid()  # its children are killed with it
    os.dup2(2, 1)  # what a user's function prints must not mix with the output of a command line
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    limit = int(float(cfg["options"].get("worker_memory_gib", 8)) * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        _scorer = Scorer(cfg)
    except Exception as error:
        _problem = f"{type(error).__name__}: {error}"


def problem() -> str | None:
    """The reason why this worker could not build its scorer, or None."""
    return _problem


def score(item: RewardItem) -> RewardResult:
    """The result of one item. The worker must have been initialised by `start`."""
    return score_safely(_scorer, item)
