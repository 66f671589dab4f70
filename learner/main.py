"""`python -m learner.main +experiment=NAME key=value ...`: read the settings, check them, run.

Nothing slow is imported before the settings are known to be right, so that a mistake in a setting
is reported in a second or two.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from contextlib import suppress
from typing import Any

from conf.schema import Config, ConfigError
from learner.checks import validate

# Arguments that are for Hydra's own application rather than overrides of settings.
HYDRA_FLAGS = {
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--multirun",
    "-m",
    "--resolve",
    "--package",
    "-p",
}


def load(arguments: list[str]) -> Config:
    """The checked settings of a command line. Raises ConfigError."""
    from conf.compose import read

    cfg = read(arguments).cfg
    validate(cfg)
    return cfg


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status.

    0: done, 1: the run failed, 2: wrong settings, 130: interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from conf.compose import read

        if HYDRA_FLAGS & set(arguments):
            return hydra_main(arguments)
        composition = read(arguments)
        validate(composition.cfg)
        if composition.sweep:
            return hydra_main(["--multirun", *composition.sweep, "hydra.sweeper.params=null"])
        from learner.run import execute
    except ConfigError as error:
        print(f"volley: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nvolley: interrupted", file=sys.stderr)
        return 130
    return execute(composition.cfg)


def hydra_main(arguments: list[str]) -> int:
    """Hand --help, --cfg job, --multirun and the like to Hydra's own application.

    A sweep makes every run that it can, one after the other, and reports those that failed.
    Returns the exit status. Raises ConfigError for an override that the schema refuses.
    """
    import hydra

    from conf.compose import CONF, check, finish, parse, register_schema, rewrite
    from learner.reports import compare

    overrides = rewrite(arguments)
    check(parse([a for a in overrides if "=" in a and not a.startswith("-")]))
    register_schema()
    sys.argv = [sys.argv[0], *overrides]
    runs: list[tuple[str, int]] = []  # (folder of the run or what was wrong, exit status)

    def job(node: Any) -> None:
        try:
            cfg = finish(node)
            validate(cfg)
        except ConfigError as error:
            print(f"volley: error: {error}", file=sys.stderr)
            runs.append((str(error), 2))
            return
        is_done = compare.finished(cfg)
        note = ": finished already" if is_done else ""
        print(f"volley: run {len(runs) + 1}: {cfg.run_dir or cfg.experiment}{note}", flush=True)
        status = 0 if is_done else execute_in_process(cfg)
        runs.append((cfg.run_dir, status))
        if status in (130, 143):  # Ctrl-C, or a SIGTERM before the run began to handle it
            raise SystemExit(status)

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    return compare.conclude(runs)


def execute_in_process(cfg: Config) -> int:
    """Execute a run in a process of its own, so that no run of a sweep meets state of another.

    Returns its exit status. Ctrl-C reaches both processes; SIGTERM is passed on. Waits without a
    deadline, because the run has its own.
    """
    run = multiprocessing.get_context("spawn").Process(target=_execute, args=(cfg,))
    run.start()
    signal.signal(signal.SIGTERM, lambda *_: run.terminate())
    while run.is_alive():
        with suppress(KeyboardInterrupt):
            run.join()
    return run.exitcode if run.exitcode >= 0 else 128 - run.exitcode


def _execute(cfg: Config) -> None:
    from learner.run import execute

    raise SystemExit(execute(cfg))


if __name__ == "__main__":
    status = main()
    # When Ctrl-C arrives during an `exec` (the import of a dataclass runs one), `python -m` records
    # the interrupt as unhandled and would exit with -2 instead of 130. Another `exec` clears it.
    exec("")
    raise SystemExit(status)
