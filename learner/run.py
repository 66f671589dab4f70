"""One run from start to end: its folder, its cluster, its signals, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from cluster.security import redact
from learner import checkpoint, resume
from learner.config import Config

STOP_S = 11.0  # a run that was interrupted, or is done, is gone after this, whatever hangs
# What the semaphores of this run's reward workers are called: nothing else tells whose they are once their maker and
# Python's own cleaner have been killed, as Ray does when it ends.
SEMAPHORES = f"volley-{uuid.uuid4().hex}"


class RunError(RuntimeError):
    """The run cannot go on; the message is for the user and says what to do."""


class Stopping(threading.Event):
    """Set by SIGTERM. While `gently` the trainer is in its loop and ends after the step, with a checkpoint; at any
    other time there is nothing to save, and everything ends at once."""

    gently = False
    run_dir: Path | None = None


def locate(cfg: Config) -> Path:
    """The run's folder, which may not exist yet; refuses one that holds a run already."""
    run_dir = Path(cfg.run_dir or f"outputs/{cfg.experiment}-{time.strftime('%Y%m%d-%H%M%S')}")
    if not run_dir.is_absolute():
        run_dir = home(run_dir) / run_dir
    if cfg.resume not in ("never", "auto") and not cfg.run_dir and "://" not in cfg.resume:
        given = Path(cfg.resume).absolute()  # of a run, or of a checkpoint in it: go on there
        run_dir = next((p for p in (given, given.parent.parent) if (p / checkpoint.FOLDER).is_dir()), run_dir)
    begun = any((run_dir / name).exists() for name in ("metrics.jsonl", "checkpoints", "summary.json"))
    if begun and cfg.resume == "never":  # a start that failed before its first step is no run
        raise RunError(f"run_dir={run_dir}: holds a run already. Give another run_dir, or go on with that run: "
                       "resume=auto.")
    return run_dir


def home(run_dir: Path, here: Path | None = None) -> Path:
    """Where a relative run_dir lies: in the current folder `here`. That of a submitted job is Ray's copy, which goes
    with the job; VOLLEY_HOME, set by `make cluster` and cluster/submit.py, says where instead."""
    here = here or Path.cwd()
    if "runtime_resources" not in here.parts:
        return here
    if given := os.environ.get("VOLLEY_HOME"):
        return Path(given)
    raise RunError(f"run_dir={run_dir}: is relative, and the folder of a submitted job is a copy that Ray deletes. "
                   "Give an absolute one, on a disk that every node sees, or VOLLEY_HOME in the runtime environment.")


def prepare(cfg: Config, run_dir: Path | None = None) -> Path:
    """Create the run's folder and write the resolved configuration into it, but for secrets."""
    run_dir = run_dir or locate(cfg)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(redact(dataclasses.asdict(cfg)), sort_keys=False))
    except OSError as error:
        raise RunError(f"run_dir={run_dir}: cannot be written: {error}") from error
    return run_dir


def execute(cfg: Config) -> int:
    """Run `cfg`; returns the exit status (0 done, 1 failed, 130 interrupted)."""
    stopping = Stopping()
    signal.signal(signal.SIGTERM, lambda *_: _terminate(stopping))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")  # else SIGTERM waits 30 s while Ray starts
    status = 130
    try:
        status = _attempt(cfg, stopping)
    finally:
        _close(stopping.run_dir, status)
    return status


def _attempt(cfg: Config, stopping: Stopping) -> int:
    started = time.monotonic()
    try:
        run_dir = locate(cfg)
        if not cfg.preflight:
            stopping.run_dir = run_dir  # a check cleans nothing up there: a run may be going on
            print(f"volley: {cfg.experiment} -> {run_dir}", flush=True)
        from learner import preflight  # a second or two, hence after the first line

        if cfg.preflight:
            return preflight.report(cfg, run_dir)
        for note in preflight.quick(cfg, run_dir):
            print(f"volley: note: {note}", flush=True)
        store = checkpoint.open_store(cfg, run_dir)
        saved = resume.find(cfg, run_dir, store)
        if cfg.checkpoint.folder:
            store.probe()
        prepare(cfg, run_dir)
        _run(cfg, run_dir, started, stopping, store, saved)
        return 0
    except (KeyboardInterrupt, SystemExit):  # the latter from a handler of Ray's, while it starts
        _ignore_signals()
        print("\nvolley: interrupted: stopping every process", file=sys.stderr, flush=True)
        return 130
    except Exception as error:  # noqa: BLE001 - the last place where a failure can be told
        print(f"volley: error: {_first_cause(error)}", file=sys.stderr, flush=True)
        if os.environ.get("VOLLEY_TRACEBACK"):
            traceback.print_exc()
        else:
            print("volley: set VOLLEY_TRACEBACK=1 to see where it happened", file=sys.stderr, flush=True)
        return 1


def _run(cfg: Config, run_dir: Path, started: float, stopping: Stopping, store: checkpoint.Store,
         saved: Path | None) -> None:
    from cluster import placement
    from cluster.local import connect

    if cfg.stage == "rl":
        from learner import algorithms

        algorithms.check(cfg.algorithm)  # slow to import, hence not among the checks of the settings
    print(f"volley: {connect(cfg, namespace=run_dir.name)}", flush=True)
    if places := placement.reserve(cfg):
        print(f"volley: {places}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: _terminate(stopping))  # Ray has just put a handler of its own there
    if cfg.stage == "pretrain":
        from learner.pretrain import pretrain

        pretrain(cfg, run_dir)
    elif cfg.stage == "reward_model":
        from learner.reward_training import train

        train(cfg, run_dir, stopping, store, saved)
    elif cfg.stage == "annotate":
        from learner.annotate import annotate

        annotate(cfg, run_dir, stopping)
    else:
        from learner.trainer import Trainer

        Trainer(cfg, run_dir, started, stopping, store, saved).run()


def _close(run_dir: Path | None, status: int) -> None:
    """End the local cluster (half-started ones too) and whatever our actors started themselves. Where that takes too
    long it is cut short, with the run's own exit status: a run that is done stays done."""
    _ignore_signals()
    limit = _force_exit_after(STOP_S, run_dir, status)
    children = psutil.Process().children(recursive=True)
    shared = _shared_files(children)
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    if connected:
        ray.shutdown()
    _end(children, shared, run_dir, 3.0 if connected else 0.0)
    limit.cancel()


def _end(processes: list[psutil.Process], shared: set[str], run_dir: Path | None, grace_s: float) -> None:
    """Kill what has not ended within `grace_s`, then remove what nobody is left to remove."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    shared = shared | _shared_files(alive)
    for process in alive:
        with suppress(psutil.NoSuchProcess):  # gone with its parent, a moment ago
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)
    for file in {*map(Path, shared), *Path("/dev/shm").glob(f"sem.{SEMAPHORES}-*")}:
        file.unlink(missing_ok=True)
    for beside in () if run_dir is None else (p for d in ("", checkpoint.FOLDER, "rollouts")
                                              for p in (run_dir / d).glob("*.partial")):
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


def _ignore_signals() -> None:
    """The cleaning up must not be interrupted; it has a deadline of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _terminate(stopping: Stopping) -> None:
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


def _first_cause(error: BaseException) -> str:
    """The message that helps: of what an actor raised rather than of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    error = cause if isinstance(cause, BaseException) else error
    text = str(error).strip() or type(error).__name__
    if type(error).__name__ in ("ObjectStoreFullError", "OutOfDiskError"):
        return (f"Ray's object store is full, and the disk behind it too: {text.splitlines()[0]} Raise "
                "cluster.object_store_mib, or free space on the disk of Ray's session folder (/tmp/ray, RAY_TMPDIR).")
    plain = isinstance(error, RunError | checkpoint.CheckpointError | ValueError) or "\n" in text
    return text if plain else f"{type(error).__name__}: {text}"
