"""An elastic pool of killable scoring processes: every item under its own hard deadline, nothing lost.

The processes are pebble's: one item is one task of a `pebble.ProcessPool`, which kills the worker that exceeds the
task's time. A lane is such a pool with one worker, so that workers can be added and dropped, and so that a worker
killed from outside, perhaps with the lock of its pipe in hand, cannot stop another: its lane is replaced and what was
given to it is given again. Alarms are not used: they fire only in main threads and not inside C code.
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

DEPTH = 2  # items given to a worker: the one it is at, and one that waits in its pipe
MAX_DEATHS = (
    3  # a worker that dies (not killed by us) while at an item: the item is tried this often in all
)
BURST = 16  # items waiting for each further worker that is started; items queued between wake-ups of the dispatcher
TICK = 0.2  # seconds between looks at the lanes when nothing happens
GRACE = 5.0  # seconds after a deadline at which pebble has not enforced it and the lane is given up


class RewardPoolError(RuntimeError):
    """The pool cannot work at all: its workers do not start. Never raised for one bad item."""


@dataclass
class _Job:
    item: RewardItem
    done: Future = field(default_factory=Future)
    deaths: int = 0


class _Lane:
    """One worker. `jobs`: given and unanswered, oldest first, which is the one it works at since `since`."""

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
        """Raises RuntimeError if pebble's pool is broken."""
        if not self.jobs:
            self.since = time.monotonic()
        self.jobs[self._schedule(worker.score, job.item, timeout=timeout)] = job

    def stop(self) -> threading.Thread:
        """Kills the worker; the thread returned ends when it is gone."""
        self.pool.stop()
        thread = threading.Thread(target=self.pool.join, daemon=True)
        thread.start()
        return thread


class RewardPool:
    """score(items) -> results in order, for any number of calling threads.

    `reward_cfg`: mapping with rules, combine, timeout_s (seconds an item may run before its worker is killed), options.
    `workers`: the most processes; one is kept, more come with demand and go after `idle_s` seconds without work.
    options.max_pending (default 4096): items admitted at once; callers beyond that wait (back-pressure).
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
                f"reward.workers={workers}, reward.timeout_s={self.timeout_s}: both must be positive"
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
        """Scores every item; blocks. Raises RewardPoolError if the pool is closed or cannot start workers."""
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
        """Counts by status (and worker deaths and kills), and one example of each status other than ok."""
        return {
            "counts": dict(self.counts),
            "examples": dict(self.examples),
            "workers": len(self._lanes),
            "pending": len(self._queue) + sum(len(lane.jobs) for lane in list(self._lanes)),
        }

    def report(self) -> dict[str, Any]:
        """stats() with the examples as text."""
        examples = {
            status: f"item {result.id}: {result.reason}" for status, result in self.examples.items()
        }
        return {**self.stats(), "examples": examples}

    def close(self) -> None:
        """Kills the workers. Calls still waiting raise RewardPoolError."""
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

    # ---- dispatcher thread, which alone changes lanes and jobs

    def _loop(self) -> None:
        try:
            while not (self._closed or self._failure):
                self._feed()
                with suppress(queue.Empty):
                    event = self._events.get(timeout=TICK)
                    while True:
                        if event and event[0] in self._lanes:
                            self._receive(*event)
                        event = self._events.get_nowait()
                self._look_after()
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
        for depth in range(DEPTH):
            for lane in [lane for lane in self._lanes if lane.ready and len(lane.jobs) <= depth]:
                if self._queue:
                    job = self._queue.popleft()
                    try:
                        lane.give(job, self.timeout_s)
                    except RuntimeError:  # broken; _look_after sees to it
                        self._queue.appendleft(job)
        starting = sum(not lane.ready for lane in self._lanes)
        wanted = 1 if not self._lanes else math.ceil(len(self._queue) / BURST) - starting
        for _ in range(min(wanted, self.max_workers - len(self._lanes))):
            self._lanes.append(_Lane(self.cfg, self._context, self._events))

    def _receive(self, lane: _Lane, future: Future) -> None:
        lane.since, error = time.monotonic(), future.exception()
        if isinstance(error, ProcessExpired | BrokenProcessPool):
            self._bury(lane, lane.jobs.get(future), error)
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

    def _bury(self, lane: _Lane, head: _Job | None, error: BaseException | str) -> None:
        """A worker died on its own (killed from outside, out of memory, crash): redo what its lane had."""
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
                    f"the worker process died {head.deaths} times while scoring this item ({cause})",
                )
        self._queue.extendleft(reversed(jobs))

    def _look_after(self) -> None:
        now = time.monotonic()
        for lane in list(self._lanes):
            idle = now - lane.since
            if not lane.pool.active:
                self._bury(lane, None, "its pipe broke")
            elif not lane.ready and idle > self.start_timeout_s:
                self._failure = (
                    f"no worker was ready within start_timeout_s={self.start_timeout_s:g} s"
                )
            elif lane.jobs and idle > self.timeout_s + GRACE:
                self._bury(lane, None, "it did not answer")
            elif lane.ready and not lane.jobs and len(self._lanes) > 1 and idle > self.idle_s:
                self._lanes.remove(lane)
                lane.stop()
