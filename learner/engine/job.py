"""What the controller hands to the learner's ranks for one batch of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from cluster.monitoring.stat import Stat


class Diagnostic(Protocol):
    """A measurement that is made before the update and is not needed for training.

    It is plain data that travels with an UpdateJob (learner/engine/diagnostics.py).
    """

    def measure(self, rank: Any, job: UpdateJob) -> Mapping[str, Stat]:
        """Return Stats by name, to be merged over all ranks.

        Every rank (learner.engine.rank.LearnerRank) calls it, because a forward pass may be a
        collective. For a quantity of the whole batch, all ranks but rank 0 return {}.
        """


@dataclass(frozen=True)
class UpdateJob:
    """One batch of rollouts, and how it is trained on.

    version: of the policy that the update starts from.
    tables, references: object references of ROLLOUT and REFERENCE batches, index-aligned.
    References are None for an algorithm without a reference policy, and for groups that are not
    trained on.
    plan: records.PLAN. It names the rows of the tables, and their weights and places.
    micro_batches[u]: how many micro-batches each rank runs in optimizer step u.
    learning_rates[u]: of optimizer step u.
    temperature: at which the completions were sampled.
    policy: False if only the critic is trained (value pre-training).
    """

    version: int
    tables: list[Any]
    references: list[Any] | None
    plan: pa.RecordBatch
    micro_batches: tuple[int, ...]
    learning_rates: tuple[float, ...]
    temperature: float
    policy: bool = True
    diagnostics: tuple[Diagnostic, ...] = ()
