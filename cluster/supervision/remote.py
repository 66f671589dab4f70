"""Waiting for actors, always with a deadline (DESIGN invariant 5)."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError


class DeadlineExceeded(RuntimeError):
    """An actor did not answer in time. The message names the actor, the operation, the deadline and
    where to look."""


def get(refs: Any, timeout_s: float, operation: str, hint: str = "") -> Any:
    """`ray.get` with a deadline; raises DeadlineExceeded. `operation` names who does what, such as
    "generator-0: update_weights"; `hint` names the log to look at."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as error:
        tail = f" Look at {hint}." if hint else ""
        raise DeadlineExceeded(f"{operation}: no answer within {timeout_s:g} s.{tail}") from error


def kill(actor: Any) -> None:
    """End an actor's process now. An actor that is gone already is no error."""
    ray.kill(actor, no_restart=True)
