"""The one summary of a measured quantity, and how summaries of parts are merged. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class MetricError(ValueError):
    """A name without a definition, or a value its unit does not allow."""


@dataclass(frozen=True)
class Stat:
    """Sum, count, minimum and maximum of some values.

    This is enough to reduce a quantity exactly, however its values were split over micro-batches,
    ranks or actors (DESIGN invariant 9). An empty Stat has count 0 and min > max. If any value was
    NaN then sum, min and max are NaN.
    """

    sum: float = 0.0
    count: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @staticmethod
    def of(values: Iterable[float]) -> Stat:
        """Return the Stat of single values."""
        values = [float(v) for v in values]
        if any(math.isnan(v) for v in values):  # min() and max() may skip a NaN
            return Stat(math.nan, len(values), math.nan, math.nan)
        return Stat(math.fsum(values), len(values), min(values), max(values)) if values else Stat()

    def merge(self, other: Stat) -> Stat:
        """Return the Stat of both sets of values together."""
        nan = any(math.isnan(v) for v in (self.min, self.max, other.min, other.max))
        return Stat(
            self.sum + other.sum,
            self.count + other.count,
            math.nan if nan else min(self.min, other.min),
            math.nan if nan else max(self.max, other.max),
        )

    @property
    def mean(self) -> float:
        """The sum divided by the count; NaN for an empty Stat."""
        return self.sum / self.count if self.count else math.nan

    def reduce(self, how: str) -> float:
        """Return the mean, sum, min or max. Raises MetricError for any other reduction."""
        if how == "mean":
            return self.mean
        if how in ("sum", "min", "max"):
            return getattr(self, how) if self.count or how == "sum" else math.nan
        raise MetricError(
            f"a Stat was logged for a metric reduced by {how!r}; give a single number"
        )


class Accumulator(dict[str, Stat]):
    """Stats by name, gathered over micro-batches, ranks or actors.

    The order of merging changes nothing but the rounding of the sums.
    """

    def add(self, name: str, stat: Stat) -> None:
        """Merge `stat` into the one of this name."""
        self[name] = self.get(name, Stat()).merge(stat)

    def merge(self, other: Mapping[str, Stat]) -> None:
        """Merge every Stat of `other` into the one of the same name."""
        for name, stat in other.items():
            self.add(name, stat)
