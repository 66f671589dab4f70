"""A rank's share of a batch: from records to samples, and from samples to micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from actors.modeling.packing import FILLER, PackedBatch, TokenSequence
from actors.records import check_reference, ragged
from cluster.monitoring.stat import Stat


@dataclass
class Sample:
    """One completion with its prompt. Per-token arrays are [K], one entry per completion token.

    The optional fields are None where the algorithm does not need them, or until they are computed.
    """

    index: int  # row of the plan, the same on all ranks
    update: int  # optimizer step
    micro_batch: int
    sequence: TokenSequence  # read at each completion token
    behaviour: np.ndarray  # float32, log-probs under the policy that generated the tokens
    versions: np.ndarray  # int32, version of the policy that generated each token
    advantage: float | np.ndarray  # one for all tokens, or float64 [K]
    weight: float  # of each token in the loss of its optimizer step
    reference: np.ndarray | None = None  # float32, log-probs under the reference policy
    old: np.ndarray | None = None  # float32, log-probs under the policy that the update starts from
    values: np.ndarray | None = None  # float32, the critic's values before the update
    targets: np.ndarray | None = None  # float64, what the critic is trained towards


@dataclass
class MicroBatch:
    """Samples with their packed tokens. B samples of M completion tokens together.

    filler: there was no sample, and one of weight 0 stands in.
    """

    samples: list[Sample]
    packed: PackedBatch
    filler: bool

    def flat(self, name: str, dtype: type = np.float32) -> Tensor | None:
        """Return a per-token field of all samples, [M], or None if the samples do not have it."""
        values = [getattr(s, name) for s in self.samples]
        if values[0] is None:
            return None
        return torch.from_numpy(np.concatenate(values).astype(dtype)).to(self.packed.ids.device)

    def pad(self, value: Tensor | None) -> Tensor | None:
        """Turn [M] into [B, longest completion], with zeros elsewhere. Differentiable."""
        if value is None:
            return None
        p = self.packed
        padded = value.new_zeros(len(self.samples), max(p.counts))
        return padded.index_put((p.rows, p.columns - p.begins[p.rows]), value)

    def mask(self) -> Tensor:
        """Return which entries of a padded tensor are completion tokens, float32 of 0 and 1."""
        return self.pad(torch.ones(len(self.packed.rows), device=self.packed.ids.device))

    def advantages(self) -> Tensor:
        """Return float32 [B], or [B, longest completion] if each token has its own advantage."""
        if isinstance(self.samples[0].advantage, np.ndarray):
            return self.pad(self.flat("advantage"))
        return torch.tensor(
            [s.advantage for s in self.samples],
            dtype=torch.float32,
            device=self.packed.ids.device,
        )

    def weights(self) -> Tensor:
        """Return the weight of each sample's tokens, float64 [B]."""
        return torch.tensor(
            [s.weight for s in self.samples], dtype=torch.float64, device=self.packed.ids.device
        )

    def mismatch(self, logprobs: Tensor, version: int) -> dict[str, Stat]:
        """Return {"mismatch": Stat of |learner - generator| log-prob}, in nats, over some tokens.

        logprobs: [M], of the learner. Only tokens that policy `version` generated are compared: the
        learner holds that policy now, so the two must agree. {} if there are none.
        """
        same = self.flat("versions", np.int64) == version
        if not bool(same.any()):
            return {}
        difference = (logprobs.detach() - self.flat("behaviour"))[same].abs().double()
        return {
            "mismatch": Stat(
                float(difference.sum()),
                float(difference.numel()),
                float(difference.min()),
                float(difference.max()),
            )
        }


def read_samples(
    plan: pa.RecordBatch,
    rank: int,
    tables: dict[int, pa.RecordBatch],
    references: dict[int, pa.RecordBatch],
) -> list[Sample]:
    """Return the samples that the plan assigns to `rank`, in the plan's order.

    tables: ROLLOUT batches by their index in the plan.
    references: REFERENCE batches by the same index; empty for an algorithm without a reference
    policy. Raises RecordError.
    """
    names = ("prompt_ids", "completion_ids", "behaviour_logprobs", "versions")
    columns = {t: {n: ragged(b.column(n)) for n in names} for t, b in tables.items()}
    reference = {
        t: ragged(check_reference(b).column("ref_logprobs")) for t, b in references.items()
    }
    samples = []
    for index, r in enumerate(plan.to_pylist()):
        if r["rank"] != rank:
            continue
        c, row = columns[r["table"]], r["row"]
        samples.append(
            Sample(
                index,
                r["update"],
                r["micro_batch"],
                TokenSequence.of_completion(c["prompt_ids"][row], c["completion_ids"][row]),
                c["behaviour_logprobs"][row],
                c["versions"][row],
                r["advantage"],
                r["weight"],
                reference[r["table"]][row] if references else None,
            )
        )
    return samples


def micro_batch(samples: Sequence[Sample], update: int, number: int, device: Any) -> MicroBatch:
    """Return micro-batch `number` of optimizer step `update`, from all samples of this rank.

    If the rank has no sample in it, the micro-batch holds a filler of one token and weight 0,
    because every forward and backward pass is a collective under ZeRO.
    """
    chosen = [s for s in samples if s.update == update and s.micro_batch == number]
    members = chosen or [_filler(samples[0] if samples else None)]
    packed = PackedBatch.of([s.sequence for s in members], device)
    return MicroBatch(members, packed, not chosen)


def _filler(like: Sample | None) -> Sample:
    """Return a sample of weight 0 with the same optional fields as `like`."""
    zero = np.zeros(1, np.float32)
    optional = {
        name: None if like is None or getattr(like, name) is None else zero
        for name in ("reference", "old", "values", "targets")
    }
    advantage = zero if like is not None and isinstance(like.advantage, np.ndarray) else 0.0
    versions = np.full(1, -1, np.int32)
    return Sample(-1, 0, 0, FILLER, zero, versions, advantage, 0.0, **optional)
