"""Processes that a test started, found by a mark in their environment. Any of them may end by
itself at any moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def marked(name: str, value: str) -> list[psutil.Process]:
    """Everything alive with this variable in its environment, whatever became of its parent."""
    found = []
    for p in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if p.environ().get(name) == value and p.status() != psutil.STATUS_ZOMBIE:
                found.append(p)
    return found


def title(process: psutil.Process) -> str:
    """As `ps` shows it; empty once the process is gone."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def listening(processes: Iterable[psutil.Process]) -> dict[str, set[str]]:
    """Address -> names of those of them that accept connections there."""
    found: dict[str, set[str]] = {}
    for p in processes:
        with suppress(psutil.NoSuchProcess):
            name = p.name()
            for c in p.net_connections("inet"):
                if c.status == psutil.CONN_LISTEN:
                    found.setdefault(c.laddr.ip.removeprefix("::ffff:"), set()).add(name)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL for each that is still there."""
    for p in processes:
        with suppress(psutil.NoSuchProcess):
            p.kill()
