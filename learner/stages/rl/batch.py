"""The groups of one step as one record: it gains rewards and references on its way through the
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from actors.records import GroupMeta
from actors.rollouts import Group
from learner.algorithms.assemble import Scores, read_scores


@dataclass(frozen=True)
class ScoredGroup:
    """One finished group (prompt, scalars, reference of its ROLLOUT table) with its SCORED batch.

    `reference`: object reference of its REFERENCE batch, or None.
    """

    group: Group
    scores: pa.RecordBatch
    reference: Any = None


@dataclass(frozen=True)
class Batch:
    """All groups of a step, in the order of their ids."""

    members: tuple[ScoredGroup, ...]

    @cached_property
    def scores(self) -> Scores:
        """The rewards of all samples as arrays, in the order of the groups and their samples."""
        return read_scores([m.scores for m in self.members])

    @property
    def groups(self) -> list[Group]:
        return [m.group for m in self.members]

    @property
    def metas(self) -> list[GroupMeta]:
        return [m.group.meta for m in self.members]

    @property
    def tables(self) -> list[Any]:
        """Object references of the ROLLOUT tables."""
        return [m.group.table for m in self.members]

    @property
    def references(self) -> list[Any] | None:
        """Object references of the REFERENCE batches, None for a group without; None if no group
        has one.
        """
        found = [m.reference for m in self.members]
        return found if any(r is not None for r in found) else None

    def with_references(self, positions: Sequence[int], references: Sequence[Any]) -> Batch:
        """This batch, with references for the groups at `positions`."""
        members = list(self.members)
        for i, reference in zip(positions, references, strict=True):
            members[i] = replace(members[i], reference=reference)
        return Batch(tuple(members))
