"""Checking everything a run needs, before anything starts.

`preflight=true` prints the checks as a table, and loads the model and the data for it. Every start
makes the checks that take a moment, and prints only what is worth knowing.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

from conf.schema import Config
from learner.preflight.checks import Preflight

QUICK = ("settings", "model", "memory", "cluster", "token", "folder", "object_store")
ALL = (*QUICK, "weights", "data", "rewards")


def quick(cfg: Config, run_dir: Path) -> list[str]:
    """Make the checks of every start, and return their notes.

    Raises the error of the first check that fails (PreflightError, ModelError and others).
    """
    checks = Preflight(cfg, run_dir)
    for name in QUICK:
        getattr(checks, name)()
    return checks.notes


def report(cfg: Config, run_dir: Path) -> int:
    """Print all checks as a table, live on a terminal and line by line elsewhere.

    This is `preflight=true`. Returns the exit status: 0, or 1 after the first check that fails.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from transformers.utils.logging import disable_progress_bar

    console = Console(soft_wrap=True, highlight=False)
    table = Table(title=f"Preflight of {cfg.experiment}", title_justify="left")
    for column in ("check", "", "seen"):
        table.add_column(column, overflow="fold")
    disable_progress_bar()
    checks, failure = Preflight(cfg, run_dir), ""

    def row(name: str, verdict: str, text: str) -> None:
        table.add_row(
            name, verdict, text, style={"FAIL": "bold red", "note": "yellow"}.get(verdict)
        )
        if not console.is_terminal:
            console.print(f"{name:14}{verdict:6}{text}", markup=False)

    with Live(table, console=console) if console.is_terminal else nullcontext():
        for name in ALL:
            earlier_notes = len(checks.notes)
            try:
                seen = getattr(checks, name)()
            except Exception as error:  # noqa: BLE001 - the table shows it
                failure = str(error).strip() or type(error).__name__
                row(name.replace("_", " "), "FAIL", failure)
                break
            notes = checks.notes[earlier_notes:]
            row(name.replace("_", " "), "note" if notes else "ok", "; ".join([seen, *notes]))
    print(
        f"volley: error: {failure}" if failure else "volley: ready to run",
        flush=True,
        file=sys.stderr if failure else sys.stdout,
    )
    return int(bool(failure))
