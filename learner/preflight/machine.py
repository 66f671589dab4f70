"""What the machine has free: memory and disk; and whether a cluster can be reached."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import psutil

from cluster import plan


class PreflightError(ValueError):
    """A run cannot start. The message names the setting, the numbers and what to do."""


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that are free: of the machine, or of this process's control group
    if that allows less.

    root: where the files of control groups are.
    """
    free = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),  # version 2 of control groups
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            usage = int((root / usage_file).read_text())
        except OSError:  # the machine does not have this version
            continue
        if limit != "max":
            free = min(free, int(limit) - usage)
    return max(0, free)


def reach(address: str, timeout_s: float) -> str:
    """Check that HOST:PORT or ray://HOST:PORT accepts connections. Raises PreflightError if not."""
    if address == "auto":
        return "RAY_ADDRESS=auto: the one that Ray finds on this machine"
    parts = re.fullmatch(r"(?:ray://)?(\[[^\]]+\]|[^:/\s]+):(\d{1,5})", address)
    if not parts:
        raise PreflightError(
            f"cluster.address={address}: expected auto, local, HOST:PORT or ray://HOST:PORT."
        )
    try:
        socket.create_connection((parts[1].strip("[]"), int(parts[2])), timeout_s).close()
    except (OSError, OverflowError) as error:
        raise PreflightError(
            f"cluster.address={address}: no answer within {timeout_s:g} s: {error}. Is the head "
            "node running (`ray status` there), and its port open to this machine?"
        ) from error
    return f"{address} answers"


def disk_shortage(folder: Path, need: int) -> str:
    """Return "" if the disk of `folder` has `need` bytes free, else a sentence that says how many
    are missing."""
    free = shutil.disk_usage(existing(folder)).free
    if need <= free:
        return ""
    return f"about {plan.amount(need)} are needed, {plan.amount(free)} are free in {folder}"


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(p for p in (folder, *folder.parents) if p.is_dir())
