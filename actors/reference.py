"""Log-probs under the frozen reference policy: a pool of actors, present only when a KL term needs
them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.records import REFERENCE, ROLLOUT, Bucket, conform, list_lengths, ragged
from cluster import placement
from cluster.environment import process_env
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


class ReferencePool:
    """Spreads groups over the actors. One that dies or hangs is replaced, and its work given out
    again.

    `run_dir` holds a copy of the weights of the last reset, from which a new actor starts."""

    def __init__(self, cfg: Any, run_dir: Path) -> None:
        self.cfg, self.copy = cfg, run_dir / "reference.safetensors"
        self.is_reset = False
        self.members = [
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

    @property
    def restarts(self) -> int:
        return sum(m.health.restarts for m in self.members)

    def start(self) -> None:
        """Until each has its model."""
        for member in self.members:
            member.start()

    def logprobs(self, tables: list[Any]) -> list[Any]:
        """References of REFERENCE batches, one for each ROLLOUT reference in `tables`, once all
        exist."""
        parts = [p for p in np.array_split(np.arange(len(tables)), len(self.members)) if len(p)]
        jobs = [
            (i, "logprobs", [tables[j] for j in part], 1 + len(part))
            for i, part in enumerate(parts)
        ]
        return [ref for refs in self._all(jobs) for ref in refs[1:]]

    def distributions(self, table: Any, row: int, tokens: int) -> Any:
        """A reference of what Reference.distributions finds, once it exists."""
        return self._all([(0, "distributions", table, row, tokens, 2)])[0][1]

    def save(self, file: str) -> None:
        self._all([(0, "save", file, 1)])

    def restore(self, file: str | None) -> None:
        """Every actor reads what `save` wrote; None: the initial model."""
        self._all([(i, "restore", file, 1) for i in range(len(self.members))])
        self.is_reset = file is not None
        if file:
            self.save(str(self.copy))

    def load(self, buckets: list[Bucket]) -> None:
        """Every actor becomes the policy of these buckets (reference reset)."""
        self._all([(i, "load", buckets, 1) for i in range(len(self.members))])
        self.save(str(self.copy))
        self.is_reset = True

    def _all(self, jobs: list[tuple[Any, ...]]) -> list[list[Any]]:
        """Do jobs (actor, method, arguments ..., number of results) side by side; the references of
        their results, of
        which the first, a small one, is fetched to see that the job is done."""
        sent = [self._send(job) for job in jobs]
        for n, job in enumerate(jobs):
            member, operation = self.members[job[0]], f"reference-{job[0]}: {job[1]}"
            while True:
                try:
                    member.wait(sent[n][0], self.cfg.reference.timeout_s, operation)
                    break
                except Exception as error:  # noqa: BLE001 - classified
                    member.replace(error, partial(self._catch_up, member))
                    sent[n] = self._send(job)
        return sent

    def _send(self, job: tuple[Any, ...]) -> list[Any]:
        index, method, *arguments, results = job
        found = (
            getattr(self.members[index].actor, method)
            .options(num_returns=results)
            .remote(*arguments)
        )
        return found if isinstance(found, list) else [found]

    def _catch_up(self, member: Supervised) -> None:
        if self.is_reset:
            get(
                member.actor.restore.remote(str(self.copy)),
                self.cfg.reference.timeout_s,
                f"{member.name}: restore",
                HINT,
            )
