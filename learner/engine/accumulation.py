"""Forward and backward passes of one optimizer step, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cluster.monitoring.stat import Accumulator, Stat


def accumulate(
    engine: Any,
    count: int,
    loss: Callable[[int], tuple[Tensor, Mapping[str, Stat], bool]],
    stats: Accumulator,
) -> bool:
    """Accumulate the gradient of `count` micro-batches; return whether every rank's loss was
    finite.

    engine: the DeepSpeed engine.
    loss(m): the loss of micro-batch m, its statistics, and whether it is a filler that only keeps
    this rank's collectives in step with the others.
    stats: the statistics are merged into it, except those of a filler.
    """
    world, finite = torch.distributed.get_world_size(), torch.ones(1, device=engine.device)
    for m in range(count):
        # Left to itself, DeepSpeed counts micro-batches and may step too early or too late
        # (OpenRLHF#1131).
        engine.set_gradient_accumulation_boundary(m == count - 1)
        value, batch_stats, filler = loss(m)
        if not filler:
            stats.merge(batch_stats)
        finite *= float(torch.isfinite(value.detach()))
        # DeepSpeed averages over ranks, but the weights of the loss already sum over them.
        engine.backward(value * world)
    if world > 1:
        torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
    return bool(finite.item())
