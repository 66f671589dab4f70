"""A rank's share of a batch as padded tensors: records in, micro-batches out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from actors.records import check_reference, ragged


@dataclass
class Sample:
    """One completion with its prompt. Token arrays have one entry a completion token unless noted."""

    index: int  # row of the plan: the same on all ranks
    update: int
    micro_batch: int
    ids: np.ndarray  # int32 [prompt + completion]
    prompt: int  # prompt tokens
    behaviour: np.ndarray  # float32, log-probs under the policy that generated
    versions: np.ndarray  # int32
    advantage: Any  # float, or float64 [completion]
    weight: float
    reference: np.ndarray | None = None  # float32
    old: np.ndarray | None = None  # float32, log-probs at the start of the batch
    values: np.ndarray | None = None  # float32, the critic's values at the start of the batch
    targets: np.ndarray | None = None  # float64, what the critic learns


@dataclass
class MicroBatch:
    """Right-padded. `rows`, `columns` int64 [M]: where the completion tokens lie in `ids` [B, T]."""

    samples: list[Sample]
    empty: bool
    lengths: list[int]
    ids: Tensor
    rows: Tensor
    columns: Tensor
    place: Tensor  # int64 [M]: position within the completion

    def flat(self, name: str, dtype: type = np.float32) -> Tensor | None:
        """A per-token field of all samples, [M]; None where it is absent."""
        values = [getattr(s, name) for s in self.samples]
        if values[0] is None:
            return None
        return torch.from_numpy(np.concatenate(values).astype(dtype)).to(self.ids.device)

    def pad(self, value: Tensor | None) -> Tensor | None:
        """[M] to [B, longest completion], zeros elsewhere; differentiable."""
        if value is None:
            return None
        out = value.new_zeros(len(self.samples), max(self.lengths))
        return out.index_put((self.rows, self.place), value)

    def mask(self) -> Tensor:
        return self.pad(torch.ones(len(self.rows), device=self.ids.device))

    def advantages(self) -> Tensor:
        """[B], or [B, longest completion] where each token has its own."""
        if isinstance(self.samples[0].advantage, np.ndarray):
            return self.pad(self.flat("advantage"))
        return torch.tensor(
            [s.advantage for s in self.samples], dtype=torch.float32, device=self.ids.device
        )

    def weights(self) -> Tensor:
        return torch.tensor(
            [s.weight for s in self.samples], dtype=torch.float64, device=self.ids.device
        )


def read_samples(
    plan: pa.RecordBatch,
    rank: int,
    tables: dict[int, pa.RecordBatch],
    references: dict[int, pa.RecordBatch],
) -> list[Sample]:
    """The samples the plan gives to `rank`, in the plan's order. `references` may be empty. Raises RecordError."""
    names = ("prompt_ids", "completion_ids", "behaviour_logprobs", "versions")
    columns = {t: {n: ragged(b.column(n)) for n in names} for t, b in tables.items()}
    reference = {
        t: ragged(check_reference(b).column("ref_logprobs")) for t, b in references.items()
    }
    out = []
    for index, r in enumerate(plan.to_pylist()):
        if r["rank"] != rank:
            continue
        c, row = columns[r["table"]], r["row"]
        out.append(
            Sample(
                index,
                r["update"],
                r["micro_batch"],
                np.concatenate([c["prompt_ids"][row], c["completion_ids"][row]]),
                len(c["prompt_ids"][row]),
                c["behaviour_logprobs"][row],
                c["versions"][row],
                r["advantage"],
                r["weight"],
                reference[r["table"]][row] if references else None,
            )
        )
    return out


def micro_batch(chosen: Sequence[Sample], device: Any, like: Sample | None = None) -> MicroBatch:
    """Tensors of `chosen`. None chosen: one token of weight 0, because every backward is a collective under ZeRO;
    `like` tells which optional fields it must carry."""
    samples = list(chosen) or [_nothing(like)]
    width = max(len(s.ids) for s in samples)
    ids = np.zeros((len(samples), width), np.int64)
    for i, s in enumerate(samples):
        ids[i, : len(s.ids)] = s.ids
    lengths = [len(s.ids) - s.prompt for s in samples]
    rows = np.repeat(np.arange(len(samples)), lengths)
    columns = np.concatenate([np.arange(s.prompt, len(s.ids)) for s in samples])
    place = columns - np.repeat([s.prompt for s in samples], lengths)
    send: Callable[[np.ndarray], Tensor] = lambda a: torch.from_numpy(a).to(device)  # noqa: E731
    return MicroBatch(
        samples, not chosen, lengths, send(ids), send(rows), send(columns), send(place)
    )


def _nothing(like: Sample | None) -> Sample:
    zero = np.zeros(1, np.float32)
    optional = {
        name: None if like is None or getattr(like, name) is None else zero
        for name in ("reference", "old", "values", "targets")
    }
    advantage = zero if like is not None and isinstance(like.advantage, np.ndarray) else 0.0
    return Sample(
        -1,
        0,
        0,
        np.zeros(2, np.int32),
        1,
        zero,
        np.full(1, -1, np.int32),
        advantage,
        0.0,
        **optional,
    )
