"""How far ahead generation may run, and where every admitted prompt group is. Pure.

The bound. Groups are trained in the order of their admission, n = groups_per_step at a time. Take
a group that is admitted at policy version v, with q groups admitted before it and not yet trained.
Each step raises the version by one, so the group is trained at version v + floor(q / n). It may be
at most s versions old, so it is admitted only while floor(q / n) <= s, that is q < (s + 1) n. With
s = 0 this is strict on-policy: generate, train, sync.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field


def admissible(waiting: int, groups_per_step: int, max_staleness: int) -> int:
    """How many more groups may be admitted, with `waiting` ones neither trained nor filtered.

    >>> admissible(0, 32, 0), admissible(32, 32, 0), admissible(40, 32, 1)
    (32, 0, 24)
    """
    return max(0, (max_staleness + 1) * groups_per_step - waiting)


def sample_seed(
    run_seed: int, prompt_id: str, group_id: int, sample_index: int, version: int
) -> int:
    """Seed of one completion, in [0, 2^63). It does not depend on which generator samples it.

    `group_id` gives two occurrences of one prompt at the same version different seeds.
    """
    text = f"{run_seed}\x00{prompt_id}\x00{group_id}\x00{sample_index}\x00{version}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class ConservationError(RuntimeError):
    """A prompt group was lost, trained twice or never admitted. The message lists the ids."""


@dataclass
class Ledger:
    """Where every admitted group is.

    Invariant 6, checked every step: admitted = trained + filtered + in flight + queued. In flight
    means being generated; queued means generated and not yet trained.
    """

    admitted: int = 0
    trained: int = 0
    filtered: Counter = field(default_factory=Counter)  # reason -> groups
    in_flight: set[int] = field(default_factory=set)
    queued: set[int] = field(default_factory=set)

    def admit(self, group_id: int) -> None:
        """A new group is in flight. Group ids count up from 0."""
        if group_id != self.admitted:
            raise ConservationError(
                f"group {group_id} admitted out of order: expected {self.admitted}"
            )
        self.admitted += 1
        self.in_flight.add(group_id)

    def finish(self, group_id: int) -> None:
        """The group is generated: it moves from in flight to queued."""
        self._move(group_id, self.in_flight, "finished")
        self.queued.add(group_id)

    def train(self, group_ids: list[int]) -> None:
        """The queued groups were trained on."""
        for group_id in group_ids:
            self._move(group_id, self.queued, "trained")
        self.trained += len(group_ids)

    def drop(self, group_id: int, reason: str) -> None:
        """The queued group is left out of training, for `reason`."""
        self._move(group_id, self.queued, f"filtered ({reason})")
        self.filtered[reason] += 1

    def _move(self, group_id: int, source: set[int], event: str) -> None:
        """Remove the group from `source`. Raises ConservationError if it is not in there."""
        if group_id not in source:
            raise ConservationError(
                f"group {group_id} {event}, but it is not there to be: "
                f"in flight {sorted(self.in_flight)[:8]}, queued {sorted(self.queued)[:8]}"
            )
        source.remove(group_id)

    @property
    def waiting(self) -> int:
        """Number of groups that are admitted and neither trained nor filtered."""
        return len(self.in_flight) + len(self.queued)

    def counts(self) -> dict[str, int]:
        """Number of groups by state."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "filtered": sum(self.filtered.values()),
            "in_flight": len(self.in_flight),
            "queued": len(self.queued),
        }

    def check(self) -> None:
        """Raise ConservationError unless every admitted group is in exactly one state."""
        c = self.counts()
        if c["admitted"] != c["trained"] + c["filtered"] + c["in_flight"] + c["queued"]:
            raise ConservationError(
                f"prompt groups are not conserved: {c}; in flight {sorted(self.in_flight)}, "
                f"queued {sorted(self.queued)}"
            )
