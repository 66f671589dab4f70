"""What the machine has left: memory, disk, and whether a cluster can be reached."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import psutil

from cluster import plan


class PreflightError(ValueError):
    """A run cannot start; the message names the setting, the numbers and what to do."""


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that can still be used.

    These are those of the machine, or of this process's control group where that allows less.
    """
    free = psutil.virtual_memory().available
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (root / limit).read_text().strip(), int((root / used).read_text())
        except OSError:  # no such version of control groups here
            continue
        if most != "max":
            free = min(free, int(most) - now)
    return max(0, free)


def reach(address: str, timeout_s: float) -> str:
    """Connect to HOST:PORT (or ray://HOST:PORT) and hang up. Raises PreflightError."""
    if address == "auto":
        return "RAY_ADDRESS=auto: the one that Ray finds on this machine"
    found = re.fullmatch(r"(?:ray://)?(\[[^\]]+\]|[^:/\s]+):(\d{1,5})", address)
    if not found:
        raise PreflightError(
            f"cluster.address={address}: expected auto, local, HOST:PORT or ray://HOST:PORT."
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout_s).close()
    except (OSError, OverflowError) as error:
        raise PreflightError(
            f"cluster.address={address}: no answer within {timeout_s:g} s: {error}. Is the head "
            "node running (`ray status` there), and its port open to this machine?"
        ) from error
    return f"{address} answers"


def disk_shortage(folder: Path, need: int) -> str:
    """A sentence that says what is missing, or "" where the disk has `need` bytes free."""
    free = shutil.disk_usage(existing(folder)).free
    if need <= free:
        return ""
    return f"about {plan.amount(need)} are needed, {plan.amount(free)} are free in {folder}"


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(p for p in (folder, *folder.parents) if p.is_dir())
