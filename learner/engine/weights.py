"""Publishing weights: parameters into flat buckets in the object store, with checksums and a probe.

Under ZeRO-3 a bucket's parameters are gathered together and let go before the next, so no rank ever holds a second
full copy (DESIGN, "Weights").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from actors.records import Entry


def buckets(
    parameters: list[tuple[str, nn.Parameter]], limit: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters, at most `limit` bytes together (a larger one travels alone)."""
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        nbytes = full_numel(parameter) * parameter.element_size()
        if group and size + nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += nbytes
    if group:
        yield group


def full_numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, also where ZeRO-3 left only a shard here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered(parameters: list[nn.Parameter], zero3: bool) -> Any:
    """Context in which the parameters are whole on every rank."""
    if not zero3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def flatten(group: list[tuple[str, nn.Parameter]]) -> tuple[np.ndarray, list[Entry]]:
    """uint8 buffer [bytes] and its entries, from whole parameters; every entry starts at a multiple of 16 bytes."""
    entries, offset = [], 0
    for name, p in group:
        entries.append(Entry(name, str(p.dtype).removeprefix("torch."), tuple(p.shape), offset))
        offset += -(-p.numel() * p.element_size() // 16) * 16
    buffer = np.zeros(offset, np.uint8)
    for (_, p), e in zip(group, entries, strict=True):
        flat = p.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        buffer[e.offset : e.offset + flat.nbytes] = flat
    return buffer, entries
