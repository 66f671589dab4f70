"""A pool of supervised members: give them work, wait for the answers, and replace a member that
fails.

The rule service, the reward models, the references, the writer of rollouts and the generators are
such pools. Each adds only what is its own: which member gets the work, and how a new member is
brought up to date (`catch_up`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.supervision.supervisor import Supervised


@dataclass
class Work:
    """A piece of work whose answer has not been collected yet."""

    member: int  # index of the member that has it
    send: Callable[[Any], Any]  # (actor) -> the reference of the answer, or a list of references
    subject: Any = None  # what the work is about, for the owner of the pool
    refs: list[Any] = field(default_factory=list)  # of the answer, by the present actor


class Pool:
    """Members that share work. A member that dies, hangs or breaks its connection is replaced,
    within its budget of restarts, and its unanswered work is given to its successor.

    Whatever `Supervised.replace` raises passes through: an error that a replacement would not cure,
    RestartsExhausted, and LearnerLost."""

    def __init__(self, members: list[Supervised]) -> None:
        self.members = members
        self.unanswered: dict[Hashable, Work] = {}  # by key, in the order in which it was given

    @property
    def restarts(self) -> int:
        """How often members were started again, all together."""
        return sum(member.health.restarts for member in self.members)

    def start(self) -> None:
        """Wait until every member is up."""
        for member in self.members:
            member.start()

    def stop(self) -> None:
        """End every member's process."""
        for member in self.members:
            member.end()

    def catch_up(self, index: int) -> Any:
        """Bring a new member to the state that the others are in, before it gets work. Nothing,
        unless overridden."""

    def replace(self, index: int, why: Exception) -> Any:
        """Replace a failed member: start a successor, let it catch up and give it the unanswered
        work again. Returns what `catch_up` returned."""

        def bring_up_to_date() -> Any:
            result = self.catch_up(index)
            for work in self.unanswered.values():
                if work.member == index:
                    self._send(work)
            return result

        return self.members[index].replace(why, bring_up_to_date)

    # ---- work under a key, which survives the member that has it ---------------------------------

    def give(
        self, key: Hashable, index: int, send: Callable[[Any], Any], subject: Any = None
    ) -> Work:
        """Send work to a member. Its answer is `collect`ed under `key`, which must not be in
        use."""
        work = self.unanswered[key] = Work(index, send, subject)
        self._send(work)
        return work

    def _send(self, work: Work) -> None:
        refs = work.send(self.members[work.member].actor)
        work.refs = refs if isinstance(refs, list) else [refs]

    def collect(self, key: Hashable, timeout_s: float, operation: str) -> Any:
        """Wait for the answer to a piece of work and return it (the first one, where there are
        several references).

        Every actor that gets the work has `timeout_s` seconds for it. `operation`: for the message
        when it is late."""
        work = self.unanswered[key]
        while True:
            try:
                answer = self.members[work.member].wait(work.refs[0], timeout_s, operation)
            except Exception as error:  # noqa: BLE001 - Supervised.replace classifies it
                self.replace(work.member, error)
                continue
            del self.unanswered[key]
            return answer

    def forget(self) -> None:
        """Drop all unanswered work: nobody will collect it."""
        self.unanswered.clear()

    # ---- requests that a successor need not answer, because its catch-up does the same -----------

    def answer(self, index: int, ref: Any, timeout_s: float, operation: str) -> Any:
        """Wait for a member's answer to a request that was sent already. Where the member fails,
        replace it and return what `catch_up` returned."""
        member = self.members[index]
        try:
            return member.wait(ref, timeout_s, f"{member.name}: {operation}")
        except Exception as error:  # noqa: BLE001 - Supervised.replace classifies it
            return self.replace(index, error)

    def silent(self) -> Iterator[tuple[int, Exception]]:
        """(index, error) of each member that has not answered its ping in time. Sends the pings
        that are due."""
        for index, member in enumerate(self.members):
            if error := member.silent():
                yield index, error
