"""How sequences of unequal length share a forward pass."""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, budget: int) -> np.ndarray:
    """int64 [N]: micro-batch of each sample. Longest first, so that a micro-batch is nearly rectangular."""
    micro = np.zeros(len(lengths), np.int64)
    index, width, rows = -1, 0, 0
    for i in np.argsort(-lengths, kind="stable"):
        if index < 0 or (rows + 1) * width > budget:
            index, width, rows = index + 1, int(lengths[i]), 0
        micro[i] = index
        rows += 1
    return micro
