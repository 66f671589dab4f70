"""One run from start to end: its folder, its cluster, its signals, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import yaml

from cluster.security import redact
from cluster.stopping import RunError, Stopping, close, ignore_signals, terminate
from conf.schema import Config
from learner.checkpoints import checkpoint, resume
from learner.launch import Launch


def locate(cfg: Config) -> Path:
    """The run's folder, which may not exist yet; refuses one that holds a run already."""
    run_dir = Path(cfg.run_dir or f"outputs/{cfg.experiment}-{time.strftime('%Y%m%d-%H%M%S')}")
    if not run_dir.is_absolute():
        run_dir = home(run_dir) / run_dir
    if cfg.resume not in ("never", "auto") and not cfg.run_dir and "://" not in cfg.resume:
        given = Path(cfg.resume).absolute()  # of a run, or of a checkpoint in it: go on there
        run_dir = next(
            (p for p in (given, given.parent.parent) if (p / checkpoint.FOLDER).is_dir()), run_dir
        )
    begun = any(
        (run_dir / name).exists() for name in ("metrics.jsonl", "checkpoints", "summary.json")
    )
    if begun and cfg.resume == "never":  # a start that failed before its first step is no run
        raise RunError(
            f"run_dir={run_dir}: holds a run already. Give another run_dir, or go on with that "
            "run: resume=auto."
        )
    return run_dir


def home(run_dir: Path, here: Path | None = None) -> Path:
    """The folder that a relative run_dir is relative to: the current folder, `here`.

    A submitted job runs in a copy that Ray deletes with the job. VOLLEY_HOME, set by `make cluster`
    and cluster/jobs/submit.py, names the folder to use instead. Raises RunError if it is not set.
    """
    here = here or Path.cwd()
    if "runtime_resources" not in here.parts:
        return here
    if given := os.environ.get("VOLLEY_HOME"):
        return Path(given)
    raise RunError(
        f"run_dir={run_dir}: is relative, and the folder of a submitted job is a copy that Ray "
        "deletes. Give an absolute one, on a disk that every node sees, or VOLLEY_HOME in the "
        "runtime environment."
    )


def prepare(cfg: Config, run_dir: Path | None = None) -> Path:
    """Create the run's folder and write the resolved configuration into it, but for secrets."""
    run_dir = run_dir or locate(cfg)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(
            yaml.safe_dump(redact(dataclasses.asdict(cfg)), sort_keys=False)
        )
    except OSError as error:
        raise RunError(f"run_dir={run_dir}: cannot be written: {error}") from error
    return run_dir


def execute(cfg: Config) -> int:
    """Run `cfg`; returns the exit status (0 done, 1 failed, 130 interrupted)."""
    stopping = Stopping()
    signal.signal(signal.SIGTERM, lambda *_: terminate(stopping))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault(
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0"
    )  # else SIGTERM waits 30 s while Ray starts
    status = 130
    try:
        status = attempt(cfg, stopping)
    finally:
        close(stopping.run_dir, status)
    return status


def attempt(cfg: Config, stopping: Stopping) -> int:
    started = time.monotonic()
    try:
        run_dir = locate(cfg)
        if not cfg.preflight:
            stopping.run_dir = run_dir  # a check cleans nothing up there: a run may be going on
            print(f"volley: {cfg.experiment} -> {run_dir}", flush=True)
        from learner.preflight import table  # a second or two, hence after the first line

        if cfg.preflight:
            return table.report(cfg, run_dir)
        for note in table.quick(cfg, run_dir):
            print(f"volley: note: {note}", flush=True)
        store = checkpoint.open_store(cfg, run_dir)
        saved = resume.find(cfg, run_dir, store)
        if cfg.checkpoint.folder:
            store.probe()
        prepare(cfg, run_dir)
        run_stages(Launch(cfg, run_dir, started, stopping, store, saved))
        return 0
    except (KeyboardInterrupt, SystemExit):  # the latter from a handler of Ray's, while it starts
        ignore_signals()
        print("\nvolley: interrupted: stopping every process", file=sys.stderr, flush=True)
        return 130
    except Exception as error:  # noqa: BLE001 - the last place where a failure can be told
        print(f"volley: error: {first_cause(error)}", file=sys.stderr, flush=True)
        if os.environ.get("VOLLEY_TRACEBACK"):
            traceback.print_exc()
        else:
            print(
                "volley: set VOLLEY_TRACEBACK=1 to see where it happened",
                file=sys.stderr,
                flush=True,
            )
        return 1


def run_stages(launch: Launch) -> None:
    """Connect to Ray, reserve the places of all actors, and run the stages one after the other."""
    from cluster import placement
    from cluster.connect import connect
    from learner.algorithms import parts

    cfg = launch.cfg
    if cfg.stage.trains == "policy":
        parts.check(cfg.algorithm)  # slow to import, hence not among the checks of the settings
    print(f"volley: {connect(cfg, namespace=launch.run_dir.name)}", flush=True)
    if places := placement.reserve(cfg):
        print(f"volley: {places}", flush=True)
    # Ray has just put a handler of its own there.
    signal.signal(signal.SIGTERM, lambda *_: terminate(launch.stopping))
    # These import Ray, which may only be done once `connect` has chosen how it authenticates.
    from learner.stage import run_stage
    from learner.stages.table import pipeline

    for stage in pipeline(cfg):
        run_stage(stage, launch)


def first_cause(error: BaseException) -> str:
    """The message that helps: of what an actor raised rather than of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    error = cause if isinstance(cause, BaseException) else error
    text = str(error).strip() or type(error).__name__
    if type(error).__name__ in ("ObjectStoreFullError", "OutOfDiskError"):
        return (
            f"Ray's object store is full, and the disk behind it too: {text.splitlines()[0]} Raise "
            "cluster.object_store_mib, or free space on the disk of Ray's session folder "
            "(/tmp/ray, RAY_TMPDIR)."
        )
    plain = isinstance(error, RunError | checkpoint.CheckpointError | ValueError) or "\n" in text
    return text if plain else f"{type(error).__name__}: {text}"
