"""What kind of failure an exception is, and what is done about it: pure.

| kind | what it is | what is done |
| --- | --- | --- |
| infrastructure | a process, node or connection is gone or silent | retry: replace it, give its work out again |
| data | this one prompt cannot be worked on | drop: leave it out, with the reason |
| bug | anything else, the unknown included | stop: end the run with the error |

Exceptions are told apart by the qualified names of their classes, so that nothing that raises them is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ACTIONS = {"infrastructure": "retry", "data": "drop", "bug": "stop"}
RAY = "ray.exceptions."
INFRASTRUCTURE = {
    *(RAY + name for name in (
        "RayActorError", "WorkerCrashedError", "LocalRayletDiedError", "NodeDiedError", "OutOfMemoryError",
        "ObjectLostError", "GetTimeoutError", "RpcError")),
    "cluster.supervision.failures.LearnerLost", "cluster.supervision.remote.DeadlineExceeded", "builtins.ConnectionError",
    "builtins.TimeoutError",
    "torch.distributed.DistNetworkError", "torch.distributed.DistBackendError", "torch.distributed.DistStoreError",
}  # fmt: skip
DATA = {"vllm.exceptions.VLLMClientError"}  # the engine refuses this request, whoever gets it
# gloo raises a bare RuntimeError where its peer is gone.
LOST_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|connection refused)", re.I | re.S
)


class LearnerLost(RuntimeError):
    """The learner, or what it had published, is gone: the run must go back to its last checkpoint."""


class NoRoom(RuntimeError):
    """No node has room for an actor that the run can go on without."""


@dataclass(frozen=True)
class Failure:
    """`kind`: infrastructure | data | bug; `reason`: one line for the user."""

    kind: str
    reason: str

    @property
    def action(self) -> str:
        """retry | drop | stop"""
        return ACTIONS[self.kind]


def classify(error: BaseException) -> Failure:
    """The first exception of the chain (outermost first) that is known decides; where none is, it is a bug."""
    for e in chain(error):
        if getattr(e, "actor_init_failed", False):  # its constructor raised; it would again
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
    """Whether an object was lost that somebody else made, so that replacing who asked for it does not help."""
    return any(RAY + "ObjectLostError" in names_of(e) for e in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what Ray says caused it (`cause`: what was raised inside the actor).

    Python's own __cause__ is not followed: who wrapped an error in one of his own has judged it already."""
    seen: set[int] = set()
    current: object = error
    while isinstance(current, BaseException) and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = getattr(current, "cause", None)


def names_of(error: BaseException) -> set[str]:
    """Qualified names of an exception's class and all its bases."""
    return {f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__}


def line(error: BaseException) -> str:
    """Type and message, in one line: of what was raised inside an actor rather than of Ray's wrapping."""
    *_, inner = chain(error)
    text = next((t.strip() for t in str(inner).splitlines() if t.strip()), "")
    return f"{type(inner).__name__}: {text}" if text else type(inner).__name__
