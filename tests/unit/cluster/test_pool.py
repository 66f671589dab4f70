"""A pool gives work, replaces a member that fails, gives its unanswered work again and collects
it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.supervision.pool import Pool


class Member:
    """Stands in for a Supervised: work is a number, and its answer comes from the actor that got it
    last."""

    def __init__(self, name: str) -> None:
        self.name, self.health = name, SimpleNamespace(restarts=0)
        self.actor: list[int] = []  # the work that the present actor got, in order
        self.fails_on: dict[int, Exception] = {}

    def wait(self, ref: int, timeout_s: float, operation: str) -> str:
        if error := self.fails_on.pop(ref, None):
            raise error
        return f"{operation} by {self.name}.{self.health.restarts} within {timeout_s:g}"

    def replace(self, why: Exception, catch_up: Callable[[], Any]) -> Any:
        if not isinstance(why, ConnectionError):
            raise why
        self.health.restarts += 1
        self.actor = []
        return catch_up()


class CaughtUp(Pool):
    """Notes that a new member caught up before it got work."""

    def catch_up(self, index: int) -> str:
        self.members[index].actor.append(-1)
        return f"member {index} caught up"


def send(work: int) -> Callable[[list[int]], int]:
    def to(actor: list[int]) -> int:
        actor.append(work)
        return work

    return to


@pytest.fixture
def pool() -> CaughtUp:
    pool = CaughtUp([Member("a"), Member("b")])
    for work, index in ((10, 0), (11, 1), (12, 0), (13, 0)):
        pool.give(f"work {work}", index, send(work))
    return pool


def test_each_piece_of_work_is_collected_once_from_its_member(pool: CaughtUp) -> None:
    assert pool.collect("work 11", 5.0, "eleven") == "eleven by b.0 within 5"
    assert pool.collect("work 12", 5.0, "twelve") == "twelve by a.0 within 5"
    assert list(pool.unanswered) == ["work 10", "work 13"]


def test_a_successor_catches_up_and_gets_the_unanswered_work_of_its_predecessor_in_order(
    pool: CaughtUp,
) -> None:
    first, second = pool.members
    pool.collect("work 10", 5.0, "ten")
    first.fails_on = {13: ConnectionError("gone")}
    assert pool.collect("work 13", 5.0, "thirteen") == "thirteen by a.1 within 5"
    assert first.actor == [-1, 12, 13] and second.actor == [11]
    assert pool.restarts == 1 and list(pool.unanswered) == ["work 11", "work 12"]


def test_work_of_which_the_first_of_several_results_is_collected_keeps_the_newest_references() -> (
    None
):
    pool = Pool([Member("a")])
    work = pool.give("job", 0, lambda actor: [len(actor), "rest"])
    pool.members[0].actor.append(0)
    pool.members[0].fails_on = {0: ConnectionError("gone")}
    pool.members[0].replace = lambda why, catch_up: catch_up()
    pool.collect("job", 5.0, "job")
    assert work.refs == [1, "rest"]


def test_a_request_is_not_repeated_where_the_catch_up_stands_for_its_answer(
    pool: CaughtUp,
) -> None:
    assert pool.answer(0, 99, 5.0, "load") == "a: load by a.0 within 5"
    pool.members[0].fails_on = {99: ConnectionError("gone")}
    assert pool.answer(0, 99, 5.0, "load") == "member 0 caught up"
    assert pool.members[0].actor == [-1, 10, 12, 13]


@pytest.mark.parametrize("ask", ["collect", "answer"])
def test_what_a_replacement_does_not_cure_passes_through_and_the_work_stays(
    pool: CaughtUp, ask: str
) -> None:
    pool.members[1].fails_on = {11: ValueError("a bug"), 99: ValueError("a bug")}
    with pytest.raises(ValueError, match="a bug"):
        if ask == "collect":
            pool.collect("work 11", 5.0, "eleven")
        else:
            pool.answer(1, 99, 5.0, "load")
    assert "work 11" in pool.unanswered and pool.restarts == 0


def test_forgotten_work_is_not_given_to_a_successor(pool: CaughtUp) -> None:
    pool.forget()
    pool.replace(0, ConnectionError("gone"))
    assert pool.members[0].actor == [-1]
