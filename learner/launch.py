"""What is known of a run before any of its actors starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.stopping import Stopping
from conf.schema import Config
from learner.checkpoints import checkpoint, saved_settings


@dataclass(frozen=True)
class Launch:
    """What is known before any actor of a stage starts.

    `started`: time.monotonic() when the program began. `saved`: the verified folder of the
    checkpoint to resume from, or None.
    """

    cfg: Config  # as the user gave it
    run_dir: Path
    started: float
    stopping: Stopping
    store: checkpoint.Store
    saved: Path | None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as checkpoints and wandb hold them: without secrets."""
        return saved_settings.as_dict(self.cfg)
