"""One killable scoring process of the pool: how it is started, what runs in it, and how it is killed with its children.

Workers are forked from multiprocessing's fork server, an interpreter with one thread that has imported what they need;
the calling process, which may be a threaded actor, is never forked. So a killed worker is replaced in milliseconds.
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
    """SIGKILL to a worker and every process it started."""
    for kill in (os.killpg, os.kill):  # by its own id, if it has not yet come to leading a group
        with suppress(ProcessLookupError, TypeError):
            return kill(pid, signal.SIGKILL)


class _Process(ForkServerProcess):
    def start(self) -> None:
        """Without the caller's script, which multiprocessing would have every worker import (under Ray: all of Ray)."""
        with _START:
            script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = script

    def terminate(self) -> None:
        """At once and with its children: code that hangs, in C or on purpose, does not listen to SIGTERM."""
        kill_group(self.pid)


class WorkerContext(ForkServerContext):
    """The multiprocessing context of the pool; starts the fork server if none runs."""

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
    multiprocessing.parent_process().join()
    kill_group(os.getpid())


def start(cfg: Mapping[str, Any]) -> None:
    """First thing that runs in a worker."""
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
    """Why the worker cannot score, or None."""
    return _problem


def score(item: RewardItem) -> RewardResult:
    """Result of one item in a worker that has started."""
    return score_safely(_scorer, item)
