"""Keep actors alive: start them, watch them with pings, end them for certain, and replace those
that fail.

The decisions are made in cluster/supervision/health.py and cluster/supervision/failures.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.supervision import failures
from cluster.supervision.health import PROBES, Health
from cluster.supervision.remote import DeadlineExceeded, get, kill

GRACE_S = 2.0  # how long a process has to obey Ray before SIGKILL
LOOK_S = 2.0  # between two checks of whether a node has room for an actor that is starting


@dataclass(frozen=True)
class Process:
    """Where an actor runs: Ray's node id, the process id, and when the process was created (seconds
    since 1970)."""

    node: str
    pid: int
    created: float


def here(_: Any = None) -> Process:
    """Return the process that this is called in. An actor runs it through `__ray_call__`, which
    passes the actor."""
    return Process(
        ray.get_runtime_context().get_node_id(), os.getpid(), psutil.Process().create_time()
    )


def pingable(kind: type) -> Any:
    """Make a remote class whose pings have a thread of their own, so that the actor answers them
    while it works."""
    return ray.remote(concurrency_groups={"pings": 1})(kind)


def ping(actor: Any) -> Any:
    """Ping an actor of a `pingable` class; returns the reference of its answer."""
    return actor.__ray_call__.options(concurrency_group="pings").remote(here)


def end_process(process: Process) -> None:
    """Make sure that a process of this machine is gone.

    Ray has asked it to end already. After GRACE_S seconds it gets SIGKILL, because a stopped
    process does not obey Ray. A process that has the same id but another creation time is a
    different one, and is left alone."""
    with suppress(psutil.NoSuchProcess):
        candidate = psutil.Process(process.pid)
        if candidate.create_time() != process.created:
            return
        _, alive = psutil.wait_procs([candidate], timeout=GRACE_S)
        for p in alive:
            p.kill()
        psutil.wait_procs(alive, timeout=10)


class Supervised:
    """One actor, or several that live and die together (the learner's ranks), under one state
    machine.

    create: (suffix) -> the handles. The suffix of the name differs each time, because Ray frees the
        name of a dead actor late.
    cluster: ClusterConfig.
    budget, restarts: the name of the setting that limits the restarts, and its value.
    start_s: how many seconds a start may take.
    hint: which log an error message points to.
    ping: (actor) -> the reference of a probe's answer. None: the actor is not probed.
    homeless: whether a start is to be given up, because no node has room and the run can continue
        without the actor.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[str], list[Any]],
        cluster: Any,
        budget: str,
        restarts: int,
        start_s: float,
        hint: str,
        ping: Callable[[Any], Any] | None = None,
        homeless: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name, self.create, self.start_s, self.hint = name, create, start_s, hint
        self.ping, self.homeless = ping, homeless
        self.health = Health(
            name,
            budget,
            restarts,
            cluster.restart_window_s,
            cluster.restart_backoff_s,
            cluster.probe_timeout_s,
        )
        self.actors = create("")
        self.processes: list[Process] = []
        self.probe: Any = None

    @property
    def actor(self) -> Any:
        """The only actor, or the first of several."""
        return self.actors[0]

    def ready(self) -> None:
        """Wait until the constructors have returned. Raises DeadlineExceeded, NoRoom, or what a
        constructor raised."""
        refs = [a.__ray_call__.remote(here) for a in self.actors]
        until = time.monotonic() + self.start_s
        while (
            len(ray.wait(refs, num_returns=len(refs), timeout=LOOK_S)[0]) < len(refs)
            and time.monotonic() < until
        ):
            if self.homeless():
                raise failures.NoRoom(f"{self.name}: no node has room for it")
        self.processes = get(
            refs, max(0.1, until - time.monotonic()), f"{self.name}: start", self.hint
        )

    def start(self, catch_up: Callable[[], Any] = lambda: None) -> Any:
        """Wait until the actors are up, then run `catch_up` and return its result. Actors that fail
        meanwhile are replaced."""
        try:
            self.ready()
            result = catch_up()
        except Exception as error:  # noqa: BLE001 - `replace` classifies it
            return self.replace(error, catch_up)
        if self.health.state == "starting":
            self.health.move("healthy")
        return result

    def silent(self) -> DeadlineExceeded | None:
        """Send a probe if one is due. Returns the error to act on where a probe is past its
        deadline, else None."""
        if self.ping is None or self.health.state not in ("healthy", "suspect"):
            return None
        if self.probe is not None and ray.wait([self.probe], timeout=0, fetch_local=False)[0]:
            # An error counts as an answer here: that the actor died shows in the work it was given.
            self.probe = None
            self.health.heard()
        if self.health.ask():
            self.probe = self.ping(self.actor)
        before, overdue = self.health.state, self.health.overdue()
        if overdue:
            return DeadlineExceeded(
                f"{self.name}: no answer to a ping within cluster.probe_timeout_s="
                f"{self.health.deadline_s:g} s"
            )
        if self.health.state != before:
            tell(
                f"{self.name} is suspect: no answer to a ping for {self.health.deadline_s / 2:g} s"
            )
        return None

    def wait(self, ref: Any, timeout_s: float, operation: str) -> Any:
        """Return the value of `ref`. Raises DeadlineExceeded after `timeout_s` seconds, or as soon
        as a probe is past its deadline."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            ready, _ = ray.wait(
                [ref], timeout=min(left, self.health.deadline_s / PROBES), fetch_local=False
            )
            if ready:
                return get(ref, timeout_s, operation, self.hint)
            if error := self.silent():
                raise error
        raise DeadlineExceeded(
            f"{operation}: no answer within {timeout_s:g} s. Look at {self.hint}."
        )

    def replace(self, why: Exception, catch_up: Callable[[], Any] = lambda: None) -> Any:
        """End the actors, start new ones, bring them up to date with `catch_up`, and return its
        result.

        New actors that fail too are replaced in turn, until the budget of restarts is used up
        (RestartsExhausted). Raises `why`, or what the start or `catch_up` raised, where
        failures.classify says that a new actor would not help. Raises LearnerLost where an object
        that was given to the actor is lost."""
        began = time.monotonic()
        while True:
            self._restart(why)
            try:
                self.ready()
                self.health.move("stale")
                result = catch_up()
            except failures.LearnerLost:
                raise
            except failures.NoRoom:
                self.end()
                self.health.move("dead")
                raise
            except Exception as error:  # noqa: BLE001 - `_restart` classifies it
                why = error
                continue
            self.health.move("healthy")
            tell(f"{self.name} is healthy again after {time.monotonic() - began:.0f} s")
            return result

    def _restart(self, why: Exception) -> None:
        """End the actors and, after the back-off, create new ones. Raises as `replace` does."""
        failure = failures.classify(why)
        if failure.action != "retry":
            raise why
        if failures.lost_object(why):
            raise failures.LearnerLost(
                f"{self.name} was given what is gone: {failure.reason}"
            ) from why
        if self.health.state != "dead":
            self.health.move("dead")
        self.end()
        delay = self.health.restart(failure.reason.rstrip("."))
        tell(
            f"{self.name} is lost ({failure.reason}); starting it again"
            + (f" in {delay:g} s" if delay else "")
            + f", restart {self.health.restarts}"
        )
        time.sleep(delay)
        self.actors = self.create(f"-{self.health.restarts}")

    def end(self) -> None:
        """End the actors. Their processes are gone when this returns, even those that hung."""
        for actor in self.actors:
            kill(actor)
        my_node = ray.get_runtime_context().get_node_id()
        for process in self.processes:
            if process.node == my_node:
                end_process(process)
                continue
            on_its_node = NodeAffinitySchedulingStrategy(process.node, soft=False)
            # A node that cannot be reached is lost, and the process with it.
            with suppress(RayError):
                ray.get(
                    ray.remote(end_process)
                    .options(num_cpus=0, scheduling_strategy=on_its_node)
                    .remote(process),
                    timeout=30.0,
                )
        self.processes, self.probe = [], None


def tell(text: str) -> None:
    """Print one line for the user."""
    print(f"volley: {text}", flush=True)
