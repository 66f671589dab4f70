"""Learning-rate schedules: pure functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Any


def learning_rate(cfg: Any, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total`, per OptimizerConfig `cfg`.

    Linear warm-up over `warmup_steps`, from lr / warmup_steps at step 0 to lr, then constant or a
    cosine to 0.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.decay == "constant":
        return cfg.lr
    progress = (step - cfg.warmup_steps) / max(1, total - cfg.warmup_steps)
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
