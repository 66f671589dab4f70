"""Failures are classified by their cause, also within Ray's; unknown ones stop the run."""

from __future__ import annotations

import pytest

from cluster.supervision.failures import classify, line, lost_object
from cluster.supervision.health import RestartsExhausted


def made(name: str, *bases: type, **attributes: object) -> type:
    """An exception class with this qualified name, as if its package were there."""
    module, _, short = name.rpartition(".")
    return type(short, bases or (Exception,), {"__module__": module, **attributes})


def wrapped(cause: BaseException) -> BaseException:
    """The error that Ray raises for one raised inside an actor. It has both classes and the cause,
    and its message is a traceback.
    """
    both = made("ray.exceptions.RayTaskError", made("ray.exceptions.RayError"), type(cause))
    error = both("ray::Generator.generate() (pid=1)\n  File ...\nthe cause in many lines")
    error.cause = cause
    return error


RAY_ACTOR = made("ray.exceptions.RayActorError", made("ray.exceptions.RayError"))
DIED = made("ray.exceptions.ActorDiedError", RAY_ACTOR)
OWNER = made("ray.exceptions.OwnerDiedError", made("ray.exceptions.ObjectLostError"))
REFUSED = made("vllm.exceptions.VLLMValidationError", made("vllm.exceptions.VLLMClientError"))
GLOO = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
CASES = {
    "actor died": (DIED("gone"), "infrastructure"),
    "raised inside the actor": (wrapped(OWNER("owner gone")), "infrastructure"),
    "unknown class, known cause": (
        wrapped(type("Odd", (Exception,), {"cause": DIED("gone")})()),
        "infrastructure",
    ),
    "deadline": (
        made("cluster.supervision.remote.DeadlineExceeded", RuntimeError)("late"),
        "infrastructure",
    ),
    "connection": (ConnectionResetError("reset"), "infrastructure"),
    "asyncio's time-out": (wrapped(TimeoutError()), "infrastructure"),
    "lost rank, gloo": (wrapped(RuntimeError(GLOO)), "infrastructure"),
    "lost rank, NCCL": (
        made("torch.distributed.DistBackendError", RuntimeError)("x"),
        "infrastructure",
    ),
    "Ray out of memory": (made("ray.exceptions.OutOfMemoryError")("x"), "infrastructure"),
    "prompt refused": (wrapped(REFUSED("prompt is too long")), "data"),
    "constructor raised": (
        made("ray.exceptions.ActorDiedError", RAY_ACTOR, actor_init_failed=True)("x"),
        "bug",
    ),
    "GPU out of memory": (made("torch.OutOfMemoryError", RuntimeError)("x"), "bug"),
    "name alike elsewhere": (made("somewhere.RayActorError")("x"), "bug"),
    "a value": (wrapped(ValueError("closed by peer")), "bug"),
    "disk full": (OSError(28, "No space left on device"), "bug"),
    "budget used up": (RestartsExhausted("generator-0 was lost"), "bug"),
    "never heard of": (made("new.Thing")("x"), "bug"),
}


@pytest.mark.parametrize("name", CASES)
def test_kind(name: str) -> None:
    error, kind = CASES[name]
    found = classify(error)
    assert (found.kind, found.action) == (
        kind,
        {"infrastructure": "retry", "data": "drop", "bug": "stop"}[kind],
    )


def test_a_judged_error_is_not_judged_again() -> None:
    try:
        try:
            raise DIED("gone")
        except DIED as cause:
            raise RuntimeError("generator-0 cannot be replaced") from cause
    except RuntimeError as error:
        assert classify(error).kind == "bug"


def test_the_reason_is_one_line_of_what_was_raised_inside() -> None:
    assert (
        classify(wrapped(REFUSED("prompt is too long\nmore"))).reason
        == "VLLMValidationError: prompt is too long"
    )
    assert line(TimeoutError()) == "TimeoutError"


def test_a_cause_that_leads_back_ends() -> None:
    error = wrapped(ValueError("x"))
    error.cause.cause = error
    assert classify(error).kind == "bug"


def test_lost_objects() -> None:
    assert lost_object(wrapped(OWNER("x"))) and lost_object(OWNER("x"))
    assert not lost_object(DIED("x")) and not lost_object(wrapped(ValueError("x")))


def test_names_are_those_of_the_packages() -> None:
    """These are the real classes where the packages are installed, so a renamed one is noticed."""
    ray, dist = pytest.importorskip("ray.exceptions"), pytest.importorskip("torch.distributed")
    from cluster.supervision.failures import INFRASTRUCTURE
    from cluster.supervision.remote import DeadlineExceeded

    for name in INFRASTRUCTURE:
        module, _, short = name.rpartition(".")
        if module in ("ray.exceptions", "torch.distributed"):
            real = getattr(ray if module.startswith("ray") else dist, short)
            assert f"{real.__module__}.{real.__qualname__}" == name
    assert classify(DeadlineExceeded("late")).kind == "infrastructure"
    assert classify(ray.ActorDiedError()).kind == "infrastructure"
    exceptions = pytest.importorskip("vllm.exceptions")
    assert classify(exceptions.VLLMValidationError("too long")).kind == "data"
