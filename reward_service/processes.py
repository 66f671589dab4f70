"""An elastic pool of scoring processes. Every item has its own hard deadline, and no item is lost.

The worker processes belong to pebble. Each item is one task of a `pebble.ProcessPool`, which kills
the worker if the task exceeds its time. A lane is a ProcessPool with exactly one worker, for two
reasons: workers can be added and removed with demand, and a worker that is killed from outside
while it holds the lock of its pipe cannot block the other workers. If a worker dies, its lane is
replaced and the items of the lane are scored again. Alarms (SIGALRM) would not do: they fire only
in the main thread and do not interrupt C code.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pebble import ProcessExpired, ProcessPool

from reward_service import worker
from reward_service.rules.item import RewardItem, RewardResult

DEPTH = 2  # items given to a worker at a time: the one it scores, and one that waits in its pipe
# Attempts at an item whose worker dies without being killed by the pool.
MAX_DEATHS = 3
# One more worker is started per BURST waiting items; the dispatcher is woken every BURST items.
BURST = 16
TICK = 0.2  # seconds between checks of the lanes while no event arrives
GRACE = (
    5.0  # seconds after a deadline that pebble did not enforce, after which the lane is replaced
)


class RewardPoolError(RuntimeError):
    """The pool cannot score at all because its workers do not start. Never raised for one item."""


@dataclass
class _Job:
    """One admitted item, its future result, and how many workers have died while scoring it."""

    item: RewardItem
    done: Future = field(default_factory=Future)
    deaths: int = 0


class _Lane:
    """One worker process and the jobs given to it.

    `jobs` maps the future of each unanswered task to its job, oldest first. The worker is scoring
    the oldest one, and has been since `since` (monotonic seconds). `ready` says whether the worker
    has started and built its scorer.
    """

    def __init__(
        self, cfg: Mapping[str, Any], context: worker.WorkerContext, events: queue.SimpleQueue
    ):
        self.pool = ProcessPool(1, initializer=worker.start, initargs=(cfg,), context=context)
        self.events, self.jobs, self.ready, self.since = events, {}, False, time.monotonic()
        self._schedule(worker.problem)

    def _schedule(self, function: Any, *args: Any, timeout: float | None = None) -> Future:
        future = self.pool.schedule(function, args=args, timeout=timeout)
        future.add_done_callback(lambda done: self.events.put((self, done)))
        return future

    def give(self, job: _Job, timeout: float) -> None:
        """Sends a job to the worker. Raises RuntimeError if pebble's pool is broken."""
        if not self.jobs:
            self.since = time.monotonic()
        self.jobs[self._schedule(worker.score, job.item, timeout=timeout)] = job

    def stop(self) -> threading.Thread:
        """Kills the worker. The returned thread ends when the process is gone."""
        self.pool.stop()
        thread = threading.Thread(target=self.pool.join, daemon=True)
        thread.start()
        return thread


class RewardPool:
    """Scores items in worker processes: score(items) returns results in order, from any thread.

    `reward_cfg` is a mapping with rules, combine, options and timeout_s (the seconds an item may
    take before its worker is killed). `workers` is the largest number of processes: one is kept
    running, more are started with demand and stopped after `idle_s` seconds without work. At most
    options.max_pending (default 4096) items are admitted at once; further callers wait. Raises
    RewardPoolError if no worker is ready within `start_timeout_s` seconds.
    """

    def __init__(
        self,
        reward_cfg: Mapping[str, Any],
        workers: int,
        start_timeout_s: float = 120.0,
        idle_s: float = 60.0,
    ):
        self.cfg = {**dict(reward_cfg), "options": dict(reward_cfg.get("options") or {})}
        self.timeout_s = float(self.cfg.get("timeout_s", 10.0))
        if workers < 1 or not 0 < self.timeout_s < math.inf:
            raise ValueError(
                f"reward.workers={workers}, reward.timeout_s={self.timeout_s}: "
                "both must be positive"
            )
        self.max_workers, self.start_timeout_s, self.idle_s = workers, start_timeout_s, idle_s
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, RewardResult] = {}
        self._admit = threading.BoundedSemaphore(int(self.cfg["options"].get("max_pending", 4096)))
        self._queue: deque[_Job] = deque()
        self._lanes: list[_Lane] = []
        self._events: queue.SimpleQueue = (
            queue.SimpleQueue()
        )  # (lane, finished future), or None to wake
        self._context = worker.WorkerContext()
        self._bad_starts, self._failure = 0, None
        self._closed = False
        self._warm = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reward-pool", daemon=True)
        self._thread.start()
        if not self._warm.wait(start_timeout_s + 5.0) or self._failure:
            self.close()
            raise RewardPoolError(f"reward workers do not start: {self._failure or 'no answer'}")

    # ---- calling side

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores every item and returns when all are done.

        Raises RewardPoolError if the pool is closed or cannot start workers.
        """
        self._check()
        jobs = [_Job(item) for item in items]
        for index, job in enumerate(jobs):
            while not self._admit.acquire(timeout=1.0):
                self._check()
            self._queue.append(job)
            if index % BURST == 0 or job is jobs[-1]:
                self._events.put(None)
        while wait([job.done for job in jobs], 1.0).not_done:
            self._check()
        return [job.done.result() for job in jobs]

    def stats(self) -> dict[str, Any]:
        """Counts by status, worker deaths and kills, and one example of each status but ok."""
        return {
            "counts": dict(self.counts),
            "examples": dict(self.examples),
            "workers": len(self._lanes),
            "pending": len(self._queue) + sum(len(lane.jobs) for lane in list(self._lanes)),
        }

    def report(self) -> dict[str, Any]:
        """The result of stats() with its examples as text."""
        examples = {
            status: f"item {result.id}: {result.reason}" for status, result in self.examples.items()
        }
        return {**self.stats(), "examples": examples}

    def close(self) -> None:
        """Kills the workers. Calls to score that are still waiting raise RewardPoolError."""
        self._closed = True
        self._events.put(None)
        self._thread.join(10.0)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._failure or self._closed or not self._thread.is_alive():
            raise RewardPoolError(f"reward pool stopped: {self._failure or 'closed'}")

    # ---- dispatcher thread: no other thread changes lanes and jobs

    def _loop(self) -> None:
        """Runs the dispatcher until the pool is closed or has failed, then stops the lanes."""
        try:
            while not (self._closed or self._failure):
                self._feed()
                with suppress(queue.Empty):
                    event = self._events.get(timeout=TICK)
                    while True:
                        if event and event[0] in self._lanes:
                            self._receive(*event)
                        event = self._events.get_nowait()
                self._check_lanes()
        except (
            Exception
        ) as error:  # the waiting callers raise it; a silent dead thread would hang them
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            for thread in [lane.stop() for lane in self._lanes]:
                thread.join(5.0)
            self._warm.set()

    def _feed(self) -> None:
        """Gives waiting jobs to the lanes with the fewest jobs, and starts lanes with demand."""
        for depth in range(DEPTH):
            for lane in [lane for lane in self._lanes if lane.ready and len(lane.jobs) <= depth]:
                if self._queue:
                    job = self._queue.popleft()
                    try:
                        lane.give(job, self.timeout_s)
                    except RuntimeError:  # broken; _check_lanes sees to it
                        self._queue.appendleft(job)
        starting = sum(not lane.ready for lane in self._lanes)
        new_lanes = 1 if not self._lanes else math.ceil(len(self._queue) / BURST) - starting
        for _ in range(min(new_lanes, self.max_workers - len(self._lanes))):
            self._lanes.append(_Lane(self.cfg, self._context, self._events))

    def _receive(self, lane: _Lane, future: Future) -> None:
        """Handles the end of a task of a lane: a result, a timeout, an error, or a dead worker."""
        lane.since, error = time.monotonic(), future.exception()
        if isinstance(error, ProcessExpired | BrokenProcessPool):
            self._replace_lane(lane, lane.jobs.get(future), error)
        elif future not in lane.jobs:  # the first task of a lane
            self._failure = str(error) if error else future.result()
            lane.ready = True
            self._warm.set()
        else:
            job = lane.jobs.pop(future)
            if isinstance(error, TimeoutError):
                self.counts["worker_kills"] += 1
                self._fail(
                    job,
                    "timeout",
                    f"not scored within reward.timeout_s={self.timeout_s:g} s; "
                    "its worker was killed",
                )
            elif error:
                self._fail(job, "error", f"{type(error).__name__}: {error}"[:500])
            else:
                self._finish(job, future.result())

    def _fail(self, job: _Job, status: str, reason: str) -> None:
        self._finish(job, RewardResult(job.item.id, status, math.nan, {}, "", reason))

    def _finish(self, job: _Job, result: RewardResult) -> None:
        self.counts[result.status] += 1
        if result.status != "ok":
            self.examples[result.status] = result
        self._admit.release()
        job.done.set_result(result)

    def _replace_lane(self, lane: _Lane, head: _Job | None, error: BaseException | str) -> None:
        """Replaces the lane of a worker that died by itself: killed, out of memory, or a crash.

        The jobs of the lane return to the head of the queue. `head` is the job that was being
        scored; its death count grows, and at MAX_DEATHS it fails with status "error".
        """
        self._lanes.remove(lane)
        worker.kill_group(getattr(error, "pid", None))
        lane.stop()
        self.counts["worker_deaths"] += 1
        cause = f"exit code {error.exitcode}" if isinstance(error, ProcessExpired) else str(error)
        self._bad_starts = 0 if lane.ready else self._bad_starts + 1
        if self._bad_starts >= (MAX_DEATHS if self._warm.is_set() else 1):
            self._failure = f"worker died before it was ready ({cause}; see its error output above)"
        jobs = list(lane.jobs.values())
        head = head or next(iter(jobs), None)
        if head:
            head.deaths += 1
            if head.deaths >= MAX_DEATHS:
                jobs.remove(head)
                self._fail(
                    head,
                    "error",
                    f"the worker process died {head.deaths} times while scoring this item "
                    f"({cause})",
                )
        self._queue.extendleft(reversed(jobs))

    def _check_lanes(self) -> None:
        """Replaces broken and hanging lanes and stops lanes that have been idle too long."""
        now = time.monotonic()
        for lane in list(self._lanes):
            idle = now - lane.since
            if not lane.pool.active:
                self._replace_lane(lane, None, "its pipe broke")
            elif not lane.ready and idle > self.start_timeout_s:
                self._failure = (
                    f"no worker was ready within start_timeout_s={self.start_timeout_s:g} s"
                )
            elif lane.jobs and idle > self.timeout_s + GRACE:
                self._replace_lane(lane, None, "it did not answer")
            elif lane.ready and not lane.jobs and len(self._lanes) > 1 and idle > self.idle_s:
                self._lanes.remove(lane)
                lane.stop()
