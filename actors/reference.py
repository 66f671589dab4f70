"""Log-probs under the frozen reference policy, by a pool of actors.

The pool exists only if a KL term needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.records import REFERENCE, ROLLOUT, Bucket, conform, list_lengths, ragged
from cluster import placement
from cluster.environment import process_env
from cluster.supervision.pool import Pool
from cluster.supervision.remote import get
from cluster.supervision.supervisor import Supervised, ping, pingable

HINT = "the reference actor's log in the session's logs folder of Ray"


class Reference:
    """Ray actor that holds the reference policy. `cfg`: conf.schema.Config.

    Log-probs are those of the distribution at rollout.temperature.
    """

    def __init__(self, index: int, cfg: Any) -> None:
        import torch

        from actors.modeling.loading import load_model
        from actors.modeling.policy import Policy

        self.index, self.cfg = index, cfg
        torch.set_num_threads(max(1, cfg.reference.threads))
        self.device = "cuda" if cfg.reference.gpus else "cpu"
        self.policy = (
            Policy(load_model(cfg.model, cfg.seed), cfg.learner.logprob_chunk_tokens)
            .to(self.device)
            .eval()
        )

    def __repr__(self) -> str:
        return f"reference-{self.index}"

    def load(self, buckets: list[Bucket]) -> None:
        """Take over the weights of a published policy (reference reset)."""
        import torch

        from actors.weight_transfer import view

        parameters = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for bucket in buckets:
                buffer = ray.get(bucket.ref, timeout=self.cfg.reference.timeout_s)
                for entry in bucket.entries:
                    parameters[entry.name].copy_(view(buffer, entry))

    def save(self, file: str) -> None:
        """Write the weights as safetensors. After a reset they are part of a checkpoint."""
        from actors.modeling.safetensor_files import write_tensors

        write_tensors(
            Path(file),
            {n: p.detach().cpu().contiguous() for n, p in self.policy.model.named_parameters()},
        )

    def restore(self, file: str | None) -> None:
        """Load the weights that `save` wrote, or those of the initial model if `file` is None."""
        import torch
        from safetensors.torch import load_file

        from actors.modeling.loading import load_model

        saved = (
            load_file(file)
            if file
            else dict(load_model(self.cfg.model, self.cfg.seed).named_parameters())
        )
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                parameter.copy_(saved[name])

    def distributions(self, table: pa.RecordBatch, row: int, tokens: int) -> tuple[int, np.ndarray]:
        """Return (K, log-probs of the whole vocabulary, float32 [K, V]) for the exact KL.

        They belong to the first K <= `tokens` completion tokens of one row of a ROLLOUT batch.
        """
        import torch

        from actors.modeling.packing import PackedBatch, TokenSequence

        prompt, completion = (
            ragged(table.column(c))[row] for c in ("prompt_ids", "completion_ids")
        )
        ids = np.concatenate([prompt, completion])
        positions = len(prompt) + np.arange(min(tokens, len(completion)))
        b = PackedBatch.of([TokenSequence(ids, len(prompt), positions)], self.device)
        with torch.no_grad():
            logprobs, _ = self.policy(
                b.ids, b.rows, b.columns, self.cfg.rollout.temperature, full=True
            )
        return len(positions), logprobs.float().cpu().numpy()

    def logprobs(self, tables: list[Any]) -> tuple[Any, ...]:
        """Return the number of tables, then one REFERENCE batch for each reference of a ROLLOUT.

        The rows of a batch are in the order of its ROLLOUT.
        """
        batches = ray.get(list(tables), timeout=self.cfg.reference.timeout_s)
        for batch in batches:
            conform(batch, ROLLOUT, "rollout")
        prompts = [p for b in batches for p in ragged(b.column("prompt_ids"))]
        completions = [c for b in batches for c in ragged(b.column("completion_ids"))]
        values = self._completion_logprobs(prompts, completions)
        results, start = [], 0
        for batch in batches:
            rows = values[start : start + batch.num_rows]
            start += batch.num_rows
            result = pa.RecordBatch.from_arrays(
                [
                    batch.column("group_id"),
                    batch.column("sample_index"),
                    pa.array(rows, pa.list_(pa.float32())),
                ],
                schema=REFERENCE,
            )
            lengths = list_lengths(batch.column("completion_ids"))
            if (list_lengths(result.column("ref_logprobs")) != lengths).any():
                raise RuntimeError(f"{self!r}: log-probs and completions differ in length")
            results.append(result)
        return len(results), *results

    def _completion_logprobs(
        self, prompts: list[np.ndarray], completions: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Return float32 [completion tokens] for each pair of a prompt and a completion."""
        from actors.modeling.packing import (
            PackedBatch,
            TokenSequence,
            pack_sequences,
            run_packed,
        )

        def forward(b: PackedBatch) -> Any:
            temperature = self.cfg.rollout.temperature
            return self.policy(b.ids, b.rows, b.columns, temperature)[0].float()

        pairs = zip(prompts, completions, strict=True)
        sequences = [TokenSequence.of_completion(p, c) for p, c in pairs]
        micro_batches = pack_sequences(sequences, self.cfg.learner.micro_batch_tokens)
        return run_packed(forward, sequences, micro_batches, self.device)


@dataclass(frozen=True)
class Job:
    """A call of a Reference actor's method. Of its `results` the first is small, and is fetched to
    see that the call is done; the others stay in the object store."""

    member: int
    method: str
    arguments: tuple[Any, ...]
    results: int = 1

    def send(self, actor: Any) -> Any:
        """Call the method; returns the reference of the only result, or a list of references."""
        method = getattr(actor, self.method).options(num_returns=self.results)
        return method.remote(*self.arguments)


class ReferencePool(Pool):
    """The reference actors, over which groups are spread evenly.

    `run_dir` holds a copy of the weights of the last reset, from which a new actor starts."""

    def __init__(self, cfg: Any, run_dir: Path) -> None:
        self.cfg, self.copy = cfg, run_dir / "reference.safetensors"
        self.is_reset = False  # whether the reference is another policy than the initial model
        super().__init__(
            [
                Supervised(
                    f"reference-{i}",
                    partial(self._create, i),
                    cfg.cluster,
                    "cluster.restarts",
                    cfg.cluster.restarts,
                    cfg.reference.timeout_s,
                    HINT,
                    ping,
                )
                for i in range(cfg.reference.count)
            ]
        )

    def _create(self, index: int, suffix: str) -> list[Any]:
        r = self.cfg.reference
        env = process_env(r.gpus) | {"OMP_NUM_THREADS": str(max(1, r.threads))}
        return [
            pingable(Reference)
            .options(
                name=f"reference-{index}{suffix}",
                runtime_env={"env_vars": env},
                **placement.options(self.cfg, "reference", index),
            )
            .remote(index, self.cfg)
        ]

    def catch_up(self, index: int) -> None:
        """Give a new actor the weights of the last reset, if there was one."""
        if self.is_reset:
            member = self.members[index]
            get(
                member.actor.restore.remote(str(self.copy)),
                self.cfg.reference.timeout_s,
                f"{member.name}: restore",
                HINT,
            )

    def logprobs(self, tables: list[Any]) -> list[Any]:
        """Return the reference of a REFERENCE batch for each ROLLOUT reference in `tables`, once
        all batches exist."""
        parts = [p for p in np.array_split(np.arange(len(tables)), len(self.members)) if len(p)]
        jobs = [
            Job(i, "logprobs", ([tables[j] for j in part],), 1 + len(part))
            for i, part in enumerate(parts)
        ]
        return [ref for refs in self._run(jobs) for ref in refs[1:]]

    def distributions(self, table: Any, row: int, tokens: int) -> Any:
        """Return the reference of the log-probs that Reference.distributions computes, once they
        exist."""
        return self._run([Job(0, "distributions", (table, row, tokens), 2)])[0][1]

    def save(self, file: str) -> None:
        """Write the weights as safetensors."""
        self._run([Job(0, "save", (file,))])

    def restore(self, file: str | None) -> None:
        """Let every actor read what `save` wrote, or become the initial model again (None)."""
        self._run([Job(i, "restore", (file,)) for i in range(len(self.members))])
        self.is_reset = file is not None
        if file:
            self.save(str(self.copy))

    def load(self, buckets: list[Bucket]) -> None:
        """Let every actor become the policy of these buckets (reference reset)."""
        self._run([Job(i, "load", (buckets,)) for i in range(len(self.members))])
        self.save(str(self.copy))
        self.is_reset = True

    def _run(self, jobs: list[Job]) -> list[list[Any]]:
        """Do all jobs at once; returns the references of their results, once all are done."""
        try:
            works = [self.give(n, job.member, job.send) for n, job in enumerate(jobs)]
            for n, job in enumerate(jobs):
                operation = f"reference-{job.member}: {job.method}"
                self.collect(n, self.cfg.reference.timeout_s, operation)
        finally:
            self.forget()  # after an error the caller starts over, so no job may be repeated
        return [work.refs for work in works]
