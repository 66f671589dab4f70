"""An elastic pool of killable scoring processes: every item under its own hard deadline, nothing lost.

Each worker is a fresh interpreter (never a fork: the parent may be a threaded actor) on its own socket, so killing one
cannot corrupt a queue shared with another. A worker answers item by item, so the parent knows which item a worker is
at and for how long: past the deadline the worker is killed with its children, that item gets status "timeout", and the
rest of its chunk is given to another. Alarms are not used: they fire only in main threads and not inside C code.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from reward_service.rules import RewardItem, RewardResult

CHUNK = 16  # items sent to a worker at once; hides the round trip, since one takes about a millisecond
MAX_DEATHS = 3  # a worker that dies (not killed by us) while at an item: the item is tried this often in all
_ROOT = str(Path(__file__).resolve().parents[1])


class RewardPoolError(RuntimeError):
    """The pool cannot work at all: its workers do not start. Never raised for one bad item."""


@dataclass
class _Batch:
    results: list[RewardResult | None]
    left: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Job:
    item: RewardItem
    batch: _Batch
    index: int
    deaths: int = 0


class _Worker:
    """One child process; `jobs` are sent and unanswered, the head is the one it works at since `since`."""

    def __init__(self, cfg: Mapping[str, Any]):
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a stopped worker must not stop the dispatcher
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 5, 0))
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]))
        env.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reward_service.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env, start_new_session=True,
        )
        theirs.close()
        self.conn = Connection(ours.detach())
        self.jobs: deque[_Job] = deque()
        self.ready = False
        self.since = time.monotonic()
        self.conn.send(cfg)

    def give(self, jobs: list[_Job]) -> None:
        """Sends jobs; a worker found dead here is noticed at the next receive."""
        self.jobs.extend(jobs)
        self.since = time.monotonic()
        with suppress(OSError):
            self.conn.send([job.item for job in jobs])

    def kill(self) -> int:
        """Kills the worker and every process it started; returns its exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.conn.close()
        return self.process.wait()


class RewardPool:
    """score(items) -> results in order, for any number of calling threads.

    `reward_cfg`: mapping with rules, combine, timeout_s (seconds an item may run before its worker is killed), options.
    `workers`: the most processes; one is kept, more come with demand and go after `idle_s` seconds without work.
    options.max_pending (default 4096): items admitted at once; callers beyond that wait (back-pressure).
    """

    def __init__(
        self, reward_cfg: Mapping[str, Any], workers: int, start_timeout_s: float = 120.0, idle_s: float = 60.0
    ):
        self.cfg = {**dict(reward_cfg), "options": dict(reward_cfg.get("options") or {})}
        self.timeout_s = float(self.cfg.get("timeout_s", 10.0))
        if workers < 1 or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"reward.workers={workers}, reward.timeout_s={self.timeout_s}: both must be positive")
        self.max_workers, self.start_timeout_s, self.idle_s = workers, start_timeout_s, idle_s
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, RewardResult] = {}
        self._admit = threading.BoundedSemaphore(int(self.cfg["options"].get("max_pending", 4096)))
        self._queue: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._closed = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._warm = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reward-pool", daemon=True)
        self._thread.start()
        if not self._warm.wait(start_timeout_s + 5.0) or self._failure:
            self.close()
            raise RewardPoolError(f"reward workers do not start: {self._failure or 'no answer'}")

    # ---- calling side --------------------------------------------------------------------------------------------

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores every item; blocks. Raises RewardPoolError if the pool is closed or cannot start workers."""
        self._check()
        batch = _Batch([None] * len(items), len(items))
        for index, item in enumerate(items):
            while not self._admit.acquire(timeout=1.0):
                self._check()
            with self._lock:
                self._queue.append(_Job(item, batch, index))
            if index % CHUNK == 0:
                self._wake()
        self._wake()
        while items and not batch.done.wait(1.0):
            self._check()
        return [result for result in batch.results if result is not None]

    def stats(self) -> dict[str, Any]:
        """Counts by status (and worker deaths and kills), and one example of each status other than ok."""
        return {"counts": dict(self.counts), "examples": dict(self.examples), "workers": len(self._workers),
                "pending": len(self._queue) + sum(len(worker.jobs) for worker in list(self._workers))}

    def close(self) -> None:
        """Kills the workers. Calls still waiting raise RewardPoolError."""
        self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._wake_write.send(b"x")

    def _check(self) -> None:
        if self._failure or self._closed or not self._thread.is_alive():
            raise RewardPoolError(f"reward pool stopped: {self._failure or 'closed'}")

    # ---- dispatcher thread ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not (self._closed or self._failure):
                self._feed()
                by_conn = {worker.conn: worker for worker in self._workers}
                for source in wait([self._wake_read, *by_conn], timeout=self._patience()):
                    if source is self._wake_read:
                        self._wake_read.recv(4096)
                    else:
                        self._receive(by_conn[source])
                self._enforce_deadlines()
        except Exception as error:  # the waiting callers raise it; a silent dead thread would hang them
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            for worker in self._workers:
                worker.kill()
            self._wake_read.close()
            self._warm.set()

    def _feed(self) -> None:
        idle = [worker for worker in self._workers if worker.ready and not worker.jobs]
        for worker in idle:
            with self._lock:
                share = max(1, math.ceil(len(self._queue) / self.max_workers))
                jobs = [self._queue.popleft() for _ in range(min(CHUNK, share, len(self._queue)))]
            if jobs:
                worker.give(jobs)
        starting = sum(not worker.ready for worker in self._workers)
        wanted = 1 if not self._workers else math.ceil(len(self._queue) / CHUNK) - starting
        for _ in range(min(wanted, self.max_workers - len(self._workers))):
            self._workers.append(_Worker(self.cfg))

    def _patience(self) -> float:
        limits = [worker.since + (self.timeout_s if worker.ready else self.start_timeout_s)
                  for worker in self._workers if worker.jobs or not worker.ready]
        return max(0.0, min([*limits, time.monotonic() + 5.0]) - time.monotonic())

    def _receive(self, worker: _Worker) -> None:
        try:
            while worker in self._workers and worker.conn.poll():
                message = worker.conn.recv()
                worker.since = time.monotonic()
                if isinstance(message, RewardResult):
                    self._finish(worker.jobs.popleft(), message)
                elif message is None:
                    worker.ready = True
                    self._warm.set()
                else:
                    self._failure = str(message)
                    return
        except (EOFError, OSError):
            self._bury(worker)

    def _finish(self, job: _Job, result: RewardResult) -> None:
        self.counts[result.status] += 1
        if result.status != "ok":
            self.examples[result.status] = result
        job.batch.results[job.index] = result
        job.batch.left -= 1
        self._admit.release()
        if job.batch.left == 0:
            job.batch.done.set()

    def _bury(self, worker: _Worker) -> None:
        """A worker died on its own (killed from outside, out of memory, crash): redo what it had."""
        code = worker.kill()
        self._workers.remove(worker)
        self.counts["worker_deaths"] += 1
        if not worker.ready and not self._warm.is_set():
            self._failure = f"worker exited with code {code} before it was ready (see its error output above)"
        if worker.jobs:
            head = worker.jobs[0]
            head.deaths += 1
            if head.deaths >= MAX_DEATHS:
                worker.jobs.popleft()
                reason = f"the worker process died {head.deaths} times while scoring this item (exit code {code})"
                self._finish(head, RewardResult(head.item.id, "error", math.nan, {}, "", reason))
        self._requeue(worker)

    def _requeue(self, worker: _Worker) -> None:
        with self._lock:
            self._queue.extendleft(reversed(worker.jobs))
        worker.jobs.clear()

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if not worker.ready and now - worker.since > self.start_timeout_s:
                self._failure = f"no worker was ready within start_timeout_s={self.start_timeout_s:g} s"
            elif worker.jobs and now - worker.since > self.timeout_s and not worker.conn.poll():
                worker.kill()
                self._workers.remove(worker)
                self.counts["worker_kills"] += 1
                job = worker.jobs.popleft()
                reason = f"not scored within reward.timeout_s={self.timeout_s:g} s; its worker was killed"
                self._finish(job, RewardResult(job.item.id, "timeout", math.nan, {}, "", reason))
                self._requeue(worker)
            elif worker.ready and not worker.jobs and len(self._workers) > 1 and now - worker.since > self.idle_s:
                worker.kill()
                self._workers.remove(worker)
