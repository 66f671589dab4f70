"""The life of one supervised actor as a state machine, with its probes, back-off and budget of restarts: pure.

    starting -> healthy <-> suspect -> dead -> restarting -> stale -> healthy

suspect: a probe has been unanswered for half its deadline. stale: up again, but without what the others hold (current
weights, the work it is given back), so it serves nothing yet. From every state but dead an actor can die.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

NEXT: dict[str, tuple[str, ...]] = {
    "starting": ("healthy", "dead"),
    "healthy": ("suspect", "dead"),
    "suspect": ("healthy", "dead"),
    "dead": ("restarting",),
    "restarting": ("stale", "dead"),
    "stale": ("healthy", "dead"),
}
MOST_BACKOFF_S = 60.0
PROBES = 8  # a probe is sent after this fraction of the deadline without word


class RestartsExhausted(RuntimeError):
    """An actor died more often than its budget allows; the message names it and the setting."""


class Health:
    """`restarts`: how many are allowed within `window_s` seconds (setting `budget` says how many); `backoff_s`: wait
    before the second restart of a window, doubled for each further one, at most a minute; the first is at once.
    `deadline_s`: how long a probe may stay unanswered. `clock`: monotonic seconds."""

    def __init__(
        self,
        name: str,
        budget: str,
        restarts: int,
        window_s: float,
        backoff_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.budget, self.allowed = name, budget, restarts
        self.window_s, self.backoff_s, self.deadline_s, self.clock = (
            window_s,
            backoff_s,
            deadline_s,
            clock,
        )
        self.state, self.since = "starting", clock()
        self.restarts = 0  # in all
        self.recent: deque[float] = deque()  # times of the restarts within the window
        self.asked_at: float | None = None  # when the probe that is unanswered was sent
        self.heard_at = clock()

    def move(self, state: str) -> None:
        """Raises ValueError where no way leads from the present state to `state`."""
        if state not in NEXT[self.state]:
            raise ValueError(
                f"{self.name}: no way from {self.state} to {state}; from {self.state} to "
                f"{' or '.join(NEXT[self.state])}"
            )
        self.state, self.since = state, self.clock()
        self.asked_at, self.heard_at = None, self.since

    def restart(self, why: str) -> float:
        """dead -> restarting. Returns the seconds to wait before it. Raises RestartsExhausted, and stays dead."""
        now = self.clock()
        while self.recent and now - self.recent[0] >= self.window_s:
            self.recent.popleft()
        if len(self.recent) >= self.allowed:
            raise RestartsExhausted(
                f"{self.name} was lost and {self.budget}={self.allowed} restarts within cluster.restart_window_s="
                f"{self.window_s:g} are used up. The last cause: {why}."
            )
        self.move("restarting")
        count = len(self.recent)
        self.recent.append(now)
        self.restarts += 1
        return min(MOST_BACKOFF_S, self.backoff_s * 2 ** (count - 1)) if count else 0.0

    # ---- probes of an actor that is healthy or suspect -------------------------------------------------------

    def ask(self) -> bool:
        """Whether a probe is to be sent now; it then counts as sent."""
        now = self.clock()
        if self.asked_at is not None or now - self.heard_at < self.deadline_s / PROBES:
            return False
        self.asked_at = now
        return True

    def heard(self) -> None:
        """The probe was answered."""
        if self.state == "suspect":
            self.move("healthy")
        self.asked_at, self.heard_at = None, self.clock()

    def overdue(self) -> bool:
        """Whether the probe's deadline has passed; past half of it, healthy becomes suspect."""
        if self.asked_at is None:
            return False
        asked_at = self.asked_at
        waited = self.clock() - asked_at
        if waited >= self.deadline_s / 2 and self.state == "healthy":
            self.move("suspect")
            self.asked_at = asked_at
        return waited >= self.deadline_s
