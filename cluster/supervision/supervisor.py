"""Keeping actors alive: start, watch, end and replace them, as cluster/supervision/health.py and cluster/supervision/failures.py decide."""

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

GRACE_S = 2.0  # between Ray's way of ending a process and SIGKILL
LOOK_S = 2.0  # between looks at whether a node has room for what is starting


@dataclass(frozen=True)
class Process:
    """Where an actor runs: Ray's node id, and the process by its id and the time it was created."""

    node: str
    pid: int
    created: float


def here(_: Any = None) -> Process:
    """The process that this is called in; an actor runs it through __ray_call__."""
    return Process(
        ray.get_runtime_context().get_node_id(), os.getpid(), psutil.Process().create_time()
    )


def pingable(kind: type) -> Any:
    """A remote class whose pings have a thread of their own: an answer says that the process moves, whatever it is
    working at."""
    return ray.remote(concurrency_groups={"pings": 1})(kind)


def ping(actor: Any) -> Any:
    return actor.__ray_call__.options(concurrency_group="pings").remote(here)


def end_process(process: Process) -> None:
    """See a process of this machine gone: what Ray was asked to end has GRACE_S for it, then comes SIGKILL, since a
    process that is stopped does not listen to Ray."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid)
        if found.create_time() != process.created:  # the number belongs to another by now
            return
        _, alive = psutil.wait_procs([found], timeout=GRACE_S)
        for p in alive:
            p.kill()
        psutil.wait_procs(alive, timeout=10)


class Supervised:
    """One actor, or several that live and die together (the learner's ranks), under one state machine.

    `create(suffix)` returns the handles; the suffix is new each time, since Ray frees a dead actor's name late.
    `restarts` is the value of the setting `budget`; `cluster` is ClusterConfig. `ping(actor)`: the reference of a
    probe, for actors that answer while they work; `start_s`: how long a start may take; `hint`: what to look at.
    `homeless()`: whether a start is to be given up, because no node has room and the run goes on without it.
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
        self.name, self.create, self.start_s, self.hint, self.ping = (
            name,
            create,
            start_s,
            hint,
            ping,
        )
        self.homeless = homeless
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
        return self.actors[0]

    def ready(self) -> None:
        """Until the constructors have returned. Raises DeadlineExceeded, NoRoom, or what a constructor raised."""
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
        """`ready`, then `catch_up`, whose result is returned; one that dies meanwhile is replaced."""
        try:
            self.ready()
            found = catch_up()
        except Exception as error:  # noqa: BLE001 - classified
            return self.replace(error, catch_up)
        if self.health.state == "starting":
            self.health.move("healthy")
        return found

    def silent(self) -> DeadlineExceeded | None:
        """Send a probe if one is due; the error to act on where one has been unanswered past its deadline."""
        if self.ping is None or self.health.state not in ("healthy", "suspect"):
            return None
        if self.probe is not None and ray.wait([self.probe], timeout=0, fetch_local=False)[0]:
            self.probe = None  # that it died shows in what it was asked to do
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
        """Like cluster.supervision.remote.get, but raises DeadlineExceeded as soon as probes stay unanswered."""
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
        """End it and start it anew, with `catch_up` to bring it up to date; returns what that returns.

        Where the new one is lost too, again, until the budget is used up (RestartsExhausted). Where that cannot help
        (failures.classify) raises `why` itself, or what start or `catch_up` raised; LearnerLost where an object that
        was given to it is lost."""
        began = time.monotonic()
        while True:
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
            try:
                self.ready()
                self.health.move("stale")
                found = catch_up()
            except failures.LearnerLost:
                raise
            except failures.NoRoom:
                self.end()
                self.health.move("dead")
                raise
            except Exception as error:  # noqa: BLE001 - classified at the top
                why = error
                continue
            self.health.move("healthy")
            tell(f"{self.name} is healthy again after {time.monotonic() - began:.0f} s")
            return found

    def end(self) -> None:
        """Its processes are gone when this returns, hung ones too."""
        for actor in self.actors:
            kill(actor)
        mine = ray.get_runtime_context().get_node_id()
        for process in self.processes:
            if process.node == mine:
                end_process(process)
                continue
            there = NodeAffinitySchedulingStrategy(process.node, soft=False)
            with suppress(RayError):  # the node is gone or out of reach, and the process with it
                ray.get(
                    ray.remote(end_process)
                    .options(num_cpus=0, scheduling_strategy=there)
                    .remote(process),
                    timeout=30.0,
                )
        self.processes, self.probe = [], None


def tell(text: str) -> None:
    print(f"volley: {text}", flush=True)
