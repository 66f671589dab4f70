"""A rank's weights for others: in flat buckets for the generators, and as a Hugging Face directory.

Under ZeRO-3 the parameters of one bucket are gathered and released again before the next, so that
no rank ever holds a second full copy of the model (DESIGN, "Weights").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from actors.modeling.packing import PackedBatch, TokenSequence
from actors.records import Entry
from cluster.files import atomic

SAVE_BYTES = 1 << 28  # of parameters that `save_model` gathers at once


def whole_parameters(
    module: nn.Module, limit: int, rank: int, zero3: bool
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield the buckets of a module's parameters, each while its parameters are whole, on rank 0.

    limit: bytes of a bucket. Under ZeRO-3 every rank must iterate to the end, because gathering is
    a collective; nothing is yielded on ranks other than 0.
    """
    if rank != 0 and not zero3:
        return
    for group in buckets(list(module.named_parameters()), limit):
        with gathered([p for _, p in group], zero3):
            if rank == 0:
                yield group


def save_model(policy: Any, directory: Path, tokenizer: Any, rank: int, zero3: bool) -> None:
    """Write the policy as a Hugging Face directory (safetensors) on rank 0; every rank calls.

    `directory` is never incomplete. A directory of that name, left by a run that was resumed, is
    replaced.
    """
    state = {}
    for group in whole_parameters(policy.model, SAVE_BYTES, rank, zero3):
        state.update({n: p.detach().cpu().clone() for n, p in group})
    if rank != 0:
        return
    with atomic(directory) as partial:
        policy.model.save_pretrained(partial, state_dict=state)
        tokenizer.save_pretrained(partial)
        policy.save_extra_files(partial)


def probe_logprobs(engine: Any, sequences: list[list[int]], device: Any) -> list[np.ndarray]:
    """Return the log-probs of ids[1:] for each sequence of token ids, float32 [len - 1].

    Each sequence has a forward pass of its own. Under ZeRO-3 every rank must pass the same
    sequences.
    """
    logprobs = []
    with torch.no_grad():
        for ids in sequences:
            sequence = TokenSequence(np.array(ids, np.int64), 1, np.arange(1, len(ids)))
            b = PackedBatch.of([sequence], device)
            logprobs.append(engine(b.ids, b.rows, b.columns)[0].float().cpu().numpy())
    return logprobs


def buckets(
    parameters: list[tuple[str, nn.Parameter]], limit: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield consecutive parameters of at most `limit` bytes together.

    A larger parameter gets a bucket of its own.
    """
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
    """Return the number of elements of the whole parameter, also if ZeRO-3 left only a shard
    here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered(parameters: list[nn.Parameter], zero3: bool) -> Any:
    """Return a context in which the parameters are whole on every rank."""
    if not zero3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def flatten(group: list[tuple[str, nn.Parameter]]) -> tuple[np.ndarray, list[Entry]]:
    """Return a uint8 buffer [bytes] of whole parameters, and where each lies in it.

    Every entry starts at a multiple of 16 bytes. The bytes between entries are 0.
    """
    entries, offset = [], 0
    for name, p in group:
        entries.append(Entry(name, str(p.dtype).removeprefix("torch."), tuple(p.shape), offset))
        offset += -(-p.numel() * p.element_size() // 16) * 16
    buffer = np.zeros(offset, np.uint8)
    for (_, p), e in zip(group, entries, strict=True):
        flat = p.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        buffer[e.offset : e.offset + flat.nbytes] = flat
    return buffer, entries
