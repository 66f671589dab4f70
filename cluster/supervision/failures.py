"""Classify an exception as one of three kinds of failure, each of which has one remedy. Pure.

| kind | what it is | remedy |
| --- | --- | --- |
| infrastructure | a process, node or connection is lost | retry: replace it, repeat its work |
| data | this one prompt cannot be worked on | drop: leave the prompt out and report the reason |
| bug | everything else, unknown exceptions included | stop: end the run with the error |

Exceptions are recognised by the qualified names of their classes, so this module does not import
the packages that raise them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ACTIONS = {"infrastructure": "retry", "data": "drop", "bug": "stop"}
RAY = "ray.exceptions."
INFRASTRUCTURE = {
    *(RAY + name for name in (
        "RayActorError", "WorkerCrashedError", "LocalRayletDiedError", "NodeDiedError",
        "OutOfMemoryError", "ObjectLostError", "GetTimeoutError", "RpcError")),
    "cluster.supervision.failures.LearnerLost", "cluster.supervision.remote.DeadlineExceeded",
    "builtins.ConnectionError", "builtins.TimeoutError",
    "torch.distributed.DistNetworkError", "torch.distributed.DistBackendError",
    "torch.distributed.DistStoreError",
}  # fmt: skip
DATA = {"vllm.exceptions.VLLMClientError"}  # every engine would refuse this request
# gloo raises a plain RuntimeError when its peer is gone, so only the message tells.
LOST_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|connection refused)", re.I | re.S
)


class LearnerLost(RuntimeError):
    """The learner, or the weights it had published, are lost: the run must go back to its last
    checkpoint."""


class NoRoom(RuntimeError):
    """No node has room for an actor, and the run can continue without it."""


@dataclass(frozen=True)
class Failure:
    """The kind of a failure (infrastructure | data | bug) and its reason, one line for the user."""

    kind: str
    reason: str

    @property
    def action(self) -> str:
        """The remedy: retry | drop | stop."""
        return ACTIONS[self.kind]


def classify(error: BaseException) -> Failure:
    """Return the kind and the reason of a failure.

    The first known exception of the chain, outermost first, decides. Where none is known, the
    failure is a bug."""
    for e in chain(error):
        if getattr(e, "actor_init_failed", False):  # its constructor raised, and would again
            return Failure("bug", line(error))
        names = names_of(e)
        if names & INFRASTRUCTURE or (
            "builtins.RuntimeError" in names and LOST_PEER.search(str(e))
        ):
            return Failure("infrastructure", line(error))
        if names & DATA:
            return Failure("data", line(error))
    return Failure("bug", line(error))


def lost_object(error: BaseException) -> bool:
    """Return whether the cause is a lost object, such as published weights. Replacing the actor
    that asked for the object does not bring it back."""
    return any(RAY + "ObjectLostError" in names_of(e) for e in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, then what Ray names as its cause (attribute `cause`: what was raised
    inside the actor).

    Python's own `__cause__` is not followed: code that raises a new error from an old one has
    classified the old one already."""
    seen: set[int] = set()
    current: object = error
    while isinstance(current, BaseException) and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = getattr(current, "cause", None)


def names_of(error: BaseException) -> set[str]:
    """Return the qualified names of an exception's class and of all its bases."""
    return {f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__}


def line(error: BaseException) -> str:
    """Return type and message in one line, of the error raised inside the actor rather than of
    Ray's wrapper."""
    *_, inner = chain(error)
    text = next((t.strip() for t in str(inner).splitlines() if t.strip()), "")
    return f"{type(inner).__name__}: {text}" if text else type(inner).__name__
