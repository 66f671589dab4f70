"""One run from start to end: its folder, its cluster, its signals, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from cluster.security import redact
from learner.checkpoint import MANIFEST
from learner.config import Config

STOP_S = 12.0  # an interrupted run is gone after this, whatever hangs


class RunError(RuntimeError):
    """The run cannot go on; the message is for the user and says what to do."""


def locate(cfg: Config) -> Path:
    """The run's folder, which may not exist yet; refuses one that holds a run already."""
    run_dir = Path(cfg.run_dir or f"outputs/{cfg.experiment}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if cfg.resume not in ("never", "auto"):
        given = Path(cfg.resume).absolute()
        run_dir = Path(cfg.run_dir).absolute() if cfg.run_dir else given.parent.parent if (
            given / MANIFEST).is_file() else given
    begun = any((run_dir / name).exists() for name in ("metrics.jsonl", "checkpoints", "summary.json"))
    if begun and cfg.resume == "never":  # a start that failed before its first step is no run
        raise RunError(f"run_dir={run_dir}: holds a run already. Give another run_dir, or go on with that run: "
                       "resume=auto.")
    return run_dir


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
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: _terminate(stopping))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        run_dir = locate(cfg)
        if not cfg.preflight:
            print(f"volley: {cfg.experiment} -> {run_dir}", flush=True)
        from learner import preflight  # a second or two, hence after the first line

        if cfg.preflight:
            return preflight.report(cfg, run_dir)
        for note in preflight.quick(cfg, run_dir):
            print(f"volley: note: {note}", flush=True)
        prepare(cfg, run_dir)
        _run(cfg, run_dir, started, stopping)
        return 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the cleaning up
        print("\nvolley: interrupted: stopping every process", file=sys.stderr, flush=True)
        _force_exit_after(STOP_S)
        return 130
    except Exception as error:  # noqa: BLE001 - the last place where a failure can be told
        print(f"volley: error: {_first_cause(error)}", file=sys.stderr, flush=True)
        if os.environ.get("VOLLEY_TRACEBACK"):
            traceback.print_exc()
        else:
            print("volley: set VOLLEY_TRACEBACK=1 to see where it happened", file=sys.stderr, flush=True)
        return 1
    finally:
        _close()


def _run(cfg: Config, run_dir: Path, started: float, stopping: threading.Event) -> None:
    from cluster.local import connect

    if cfg.stage == "rl":
        from learner import algorithms

        algorithms.check(cfg.algorithm)  # slow to import, hence not among the checks of the settings
    print(f"volley: {connect(cfg, namespace=run_dir.name)}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: _terminate(stopping))  # Ray has just put a handler of its own there
    if cfg.stage == "pretrain":
        from learner.pretrain import pretrain

        pretrain(cfg, run_dir)
    else:
        from learner.trainer import Trainer

        Trainer(cfg, run_dir, started, stopping).run()


def _close() -> None:
    """End the local cluster and whatever our actors started themselves."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    children = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, alive = psutil.wait_procs(children, timeout=3)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _terminate(stopping: threading.Event) -> None:
    """SIGTERM: the trainer ends after its step, with a checkpoint; where that takes too long, without one."""
    if stopping.is_set():
        raise KeyboardInterrupt
    stopping.set()
    print("volley: SIGTERM: ending after this step", file=sys.stderr, flush=True)
    _force_exit_after(STOP_S)


def _force_exit_after(seconds: float) -> None:
    def end() -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # gone with its parent, killed a moment ago
                process.kill()
        os._exit(130)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _first_cause(error: BaseException) -> str:
    """The message that helps: of what an actor raised rather than of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    error = cause if isinstance(cause, BaseException) else error
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, RunError | ValueError) or "\n" in text else f"{type(error).__name__}: {text}"
