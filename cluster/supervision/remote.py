"""Waiting for actors, always with a deadline (DESIGN invariant 5)."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError


class DeadlineExceeded(RuntimeError):
    """An actor did not answer in time; the message names it, the operation, how long it was waited for and a hint."""


def get(refs: Any, timeout_s: float, operation: str, hint: str = "") -> Any:
    """ray.get with a deadline. `operation` says who does what, e.g. "generator-0: update_weights"."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as error:
        tail = f" Look at {hint}." if hint else ""
        raise DeadlineExceeded(f"{operation}: no answer within {timeout_s:g} s.{tail}") from error


def kill(actor: Any) -> None:
    """End an actor's process now; one that is gone already is fine."""
    ray.kill(actor, no_restart=True)
