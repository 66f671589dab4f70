"""Wall time of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.monitoring.progress import Progress


class Clock:
    """Measures the phases of one step and tells the progress view what the run is doing.

    `seconds`: phase -> wall time, summed over its visits.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress, self.began = progress, time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        self.progress.phase(name)
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def stop(self) -> None:
        """Note the time of the whole step, as the phase "step"."""
        self.seconds["step"] = time.monotonic() - self.began
