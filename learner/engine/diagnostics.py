"""What a rank measures besides the loss.

A diagnostic is a value in UpdateJob.diagnostics: the controller makes it, and each rank calls its
`measure` before the update. A new one needs a class here, and a line in `diagnostics_for`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from actors.records import ragged
from cluster.monitoring.stat import Stat
from learner.engine.job import Diagnostic, UpdateJob


@dataclass(frozen=True)
class ExactKL:
    """KL(policy || reference) over the whole vocabulary, at the first tokens of one completion.

    It is what the estimators of learner/algorithms/kl.py estimate, and is logged as `kl_exact`.

    table: object reference of a ROLLOUT batch.
    row: the completion's row in it.
    distributions: object reference of the reference's log-probs at the first K completion tokens,
    float32 [K, V] (Reference.distributions).
    """

    table: Any
    row: int
    distributions: Any

    def measure(self, rank: Any, job: UpdateJob) -> dict[str, Stat]:
        """Return {"kl_exact": Stat of the K values in nats} on rank 0, {} on the others."""
        import torch

        from actors.modeling.packing import PackedBatch, TokenSequence
        from learner.algorithms.kl import exact_kl

        table, reference = rank.fetch([self.table, self.distributions])
        prompt, completion = (
            ragged(table.column(c))[self.row] for c in ("prompt_ids", "completion_ids")
        )
        ids = np.concatenate([prompt, completion])
        positions = len(prompt) + np.arange(len(reference))
        b = PackedBatch.of([TokenSequence(ids, len(prompt), positions)], rank.device)
        with torch.no_grad():
            logprobs, _ = rank.engine(b.ids, b.rows, b.columns, job.temperature, full=True)
            reference = torch.from_numpy(reference).to(rank.device)
            values = exact_kl(logprobs.double(), reference.double()).tolist()
        if rank.rank != 0:
            return {}
        return {"kl_exact": Stat(sum(values), float(len(values)), min(values), max(values))}


def diagnostics_for(
    cfg: Any, reference: Any, tables: Sequence[Any], plan: pa.RecordBatch
) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of one update that the settings ask for.

    cfg: conf.schema.Config.
    reference: the ReferencePool, which computes the distributions for the exact KL of the first
    completion in `plan`.
    tables: references of ROLLOUT batches, as in UpdateJob.
    """
    tokens = cfg.algorithm.exact_kl_tokens
    if not tokens:
        return ()
    first = plan.slice(0, 1).to_pylist()[0]
    table, row = tables[first["table"]], first["row"]
    return (ExactKL(table, row, reference.distributions(table, row, tokens)),)
