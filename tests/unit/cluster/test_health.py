"""The state machine of a supervised actor allows legal transitions only, and never more restarts
than the budget in any window.
"""

from __future__ import annotations

import random

import pytest

from cluster.supervision.health import MOST_BACKOFF_S, NEXT, Health, RestartsExhausted

STATES = ("starting", "healthy", "suspect", "dead", "restarting", "stale")
LEGAL = {
    ("starting", "healthy"), ("starting", "dead"), ("healthy", "suspect"), ("healthy", "dead"),
    ("suspect", "healthy"), ("suspect", "dead"), ("dead", "restarting"), ("restarting", "stale"),
    ("restarting", "dead"), ("stale", "healthy"), ("stale", "dead"),
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(
    clock: Clock, restarts: int = 3, window_s: float = 100.0, backoff_s: float = 1.0
) -> Health:
    return Health("generator-0", "generator.restarts", restarts, window_s, backoff_s, 40.0, clock)


@pytest.mark.parametrize("old", STATES)
@pytest.mark.parametrize("new", STATES)
def test_every_transition(old: str, new: str) -> None:
    health = made(Clock())
    health.state = old
    if (old, new) in LEGAL:
        health.move(new)
        assert health.state == new
    else:
        with pytest.raises(ValueError, match=f"generator-0: no way from {old} to {new}"):
            health.move(new)
        assert health.state == old


def test_every_state_can_be_reached_and_left() -> None:
    assert set(NEXT) == set(STATES) == {s for ways in NEXT.values() for s in ways} | {"starting"}
    assert all(NEXT[s] for s in STATES)


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(ValueError, match="to asleep"):
        made(Clock()).move("asleep")


def died(health: Health) -> float:
    if health.state != "dead":
        health.move("dead")
    return health.restart("killed")


def test_back_off_doubles_up_to_a_minute_and_starts_anew_after_the_window() -> None:
    clock = Clock()
    health = made(clock, restarts=10, window_s=100.0)
    waits = []
    for _ in range(9):
        waits.append(died(health))
        health.move("stale")
    assert waits == [0, 1, 2, 4, 8, 16, 32, MOST_BACKOFF_S, MOST_BACKOFF_S]
    clock.now += 100.0
    assert died(health) == 0


def test_budget_is_of_a_window() -> None:
    clock = Clock()
    health = made(clock, restarts=2)
    for later in (0.0, 60.0):
        clock.now += later
        died(health)
        health.move("stale")
    with pytest.raises(RestartsExhausted, match=r"generator-0 .*generator\.restarts=2 .*killed"):
        died(health)
    assert health.state == "dead" and health.restarts == 2
    clock.now += 40.0  # the first of the two is now past the window, the second is not
    died(health)
    health.move("stale")
    with pytest.raises(RestartsExhausted):
        died(health)


def test_no_budget_no_restart() -> None:
    with pytest.raises(RestartsExhausted):
        died(made(Clock(), restarts=0))


def test_restart_is_of_the_dead() -> None:
    with pytest.raises(ValueError, match="from starting to restarting"):
        made(Clock()).restart("?")


def test_a_probe_is_sent_now_and_then_and_one_at_a_time() -> None:
    clock = Clock()
    health = made(clock)
    health.move("healthy")
    assert not health.ask()
    clock.now += 5.0  # an eighth of the deadline
    assert health.ask() and not health.ask()
    health.heard()
    assert not health.ask()


def test_silence_is_suspect_after_half_the_deadline_and_death_after_all_of_it() -> None:
    clock = Clock()
    health = made(clock)
    health.move("healthy")
    clock.now += 5.0
    assert health.ask()
    for waited, state, overdue in (
        (19.9, "healthy", False),
        (20.0, "suspect", False),
        (39.9, "suspect", False),
        (40.0, "suspect", True),
    ):
        clock.now = 1005.0 + waited
        assert (health.overdue(), health.state) == (overdue, state)
    health.heard()  # late, and before anybody acted on it
    assert health.state == "healthy" and not health.overdue()


def test_a_probe_of_the_one_before_does_not_count_against_its_successor() -> None:
    clock = Clock()
    health = made(clock)
    health.move("healthy")
    clock.now += 5.0
    health.ask()
    clock.now += 50.0
    assert health.overdue()
    died(health)
    assert not health.overdue()


def walk(rng: random.Random, seen: set[tuple[str, str]]) -> int:
    """A thousand random acts on one machine; returns its restarts."""
    clock = Clock()
    health, starts = made(clock, restarts=3), []
    for _ in range(1000):
        clock.now += rng.expovariate(1 / 3)
        old, act = health.state, rng.choice(("move", "restart", "ask", "heard", "overdue"))
        try:
            if act == "move":
                health.move(rng.choice([s for s in STATES if s != "restarting"]))
            elif act == "restart":
                health.restart("?")
                starts.append(clock.now)
            else:
                getattr(health, act)()
        except (ValueError, RestartsExhausted):
            assert health.state == old
        if health.state != old:
            seen.add((old, health.state))
    assert health.restarts == len(starts)
    assert max(sum(s <= t < s + 100.0 for t in starts) for s in starts) <= 3
    return len(starts)


def test_random_walks_keep_to_the_legal_ways_and_the_budget() -> None:
    rng, seen = random.Random(0), set()
    assert sum(walk(rng, seen) for _ in range(20)) > 500
    assert seen == LEGAL
