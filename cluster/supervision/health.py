"""The state machine of one supervised actor: its probes, its back-off and its budget of restarts.
Pure.

    starting -> healthy <-> suspect -> dead -> restarting -> stale -> healthy

- suspect: a probe has been unanswered for half of its deadline.
- stale: the actor runs again but lacks what the others have (current weights, its unanswered work),
  so it serves nothing yet.

An actor can die in every state.
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
PROBES = 8  # the next probe is sent after this fraction of the deadline


class RestartsExhausted(RuntimeError):
    """An actor died more often than its budget allows. The message names the actor and the
    setting."""


class Health:
    """State, probes and restarts of one actor.

    At most `restarts` restarts are allowed within `window_s` seconds; `budget` is the name of the
    setting that says so. The first restart of a window is immediate, the second waits `backoff_s`
    seconds, and each further one twice as long as the one before, up to a minute. A probe must be
    answered within `deadline_s` seconds. `clock` returns monotonic seconds."""

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
        self.window_s, self.backoff_s, self.deadline_s = window_s, backoff_s, deadline_s
        self.clock = clock
        self.state, self.since = "starting", clock()
        self.restarts = 0  # since the actor was first started
        self.recent: deque[float] = deque()  # times of the restarts within the window
        self.asked_at: float | None = None  # when the unanswered probe was sent, if there is one
        self.heard_at = clock()

    def move(self, state: str) -> None:
        """Go to another state. Raises ValueError where NEXT does not allow it."""
        if state not in NEXT[self.state]:
            raise ValueError(
                f"{self.name}: no way from {self.state} to {state}; from {self.state} to "
                f"{' or '.join(NEXT[self.state])}"
            )
        self.state, self.since = state, self.clock()
        self.asked_at, self.heard_at = None, self.since

    def restart(self, why: str) -> float:
        """Go from dead to restarting, and return how many seconds to wait before the restart.
        Raises RestartsExhausted, and stays dead, where the budget is used up."""
        now = self.clock()
        while self.recent and now - self.recent[0] >= self.window_s:
            self.recent.popleft()
        if len(self.recent) >= self.allowed:
            raise RestartsExhausted(
                f"{self.name} was lost and {self.budget}={self.allowed} restarts within "
                f"cluster.restart_window_s={self.window_s:g} are used up. The last cause: {why}."
            )
        self.move("restarting")
        count = len(self.recent)
        self.recent.append(now)
        self.restarts += 1
        return min(MOST_BACKOFF_S, self.backoff_s * 2 ** (count - 1)) if count else 0.0

    # ---- probes of an actor that is healthy or suspect -------------------------------------------

    def ask(self) -> bool:
        """Return whether a probe is due. If so, it counts as sent: the caller must send it."""
        now = self.clock()
        if self.asked_at is not None or now - self.heard_at < self.deadline_s / PROBES:
            return False
        self.asked_at = now
        return True

    def heard(self) -> None:
        """Record that the probe was answered."""
        if self.state == "suspect":
            self.move("healthy")
        self.asked_at, self.heard_at = None, self.clock()

    def overdue(self) -> bool:
        """Return whether the unanswered probe is past its deadline. Past half of it, a healthy
        actor becomes suspect."""
        if self.asked_at is None:
            return False
        asked_at = self.asked_at
        waited = self.clock() - asked_at
        if waited >= self.deadline_s / 2 and self.state == "healthy":
            self.move("suspect")
            self.asked_at = asked_at
        return waited >= self.deadline_s
