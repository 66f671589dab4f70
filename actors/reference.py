"""Log-probs under the frozen reference policy: a pool of actors, present only when a KL term needs them."""

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
    """Ray actor. `model` is ModelConfig; log-probs are those of the distribution at `temperature`."""

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
        """Become the policy of these buckets (reference reset)."""
        import torch

        from actors.weight_transfer import view

        parameters = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for bucket in buckets:
                buffer = ray.get(bucket.ref, timeout=self.cfg.reference.timeout_s)
                for entry in bucket.entries:
                    parameters[entry.name].copy_(view(buffer, entry))

    def save(self, file: str) -> None:
        """Write the weights as safetensors (a reference that was reset is part of a checkpoint)."""
        from actors.modeling.safetensor_files import write_tensors

        write_tensors(
            Path(file),
            {n: p.detach().cpu().contiguous() for n, p in self.policy.model.named_parameters()},
        )

    def restore(self, file: str | None) -> None:
        """Read what `save` wrote; None: become the initial model again."""
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
        """(K, log-probs float32 [K, vocabulary]) at the first K <= `tokens` places of one completion, for exact KL."""
        import torch

        prompt, completion = (
            ragged(table.column(c))[row] for c in ("prompt_ids", "completion_ids")
        )
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None].to(
            self.device
        )
        columns = torch.arange(
            len(prompt), len(prompt) + min(tokens, len(completion)), device=self.device
        )
        with torch.no_grad():
            found, _ = self.policy(
                ids, torch.zeros_like(columns), columns, self.cfg.rollout.temperature, full=True
            )
        return len(columns), found.float().cpu().numpy()

    def logprobs(self, tables: list[Any]) -> tuple[Any, ...]:
        """(groups, then one REFERENCE batch for each ROLLOUT reference, rows in the same order)."""
        batches = ray.get(list(tables), timeout=self.cfg.reference.timeout_s)
        rows = [(conform(b, ROLLOUT, "rollout"), i) for b in batches for i in range(b.num_rows)]
        prompts = [p for b in batches for p in ragged(b.column("prompt_ids"))]
        completions = [c for b in batches for c in ragged(b.column("completion_ids"))]
        found = self._forward(prompts, completions)
        out, start = [], 0
        for b in batches:
            values = found[start : start + b.num_rows]
            start += b.num_rows
            out.append(
                pa.RecordBatch.from_arrays(
                    [
                        b.column("group_id"),
                        b.column("sample_index"),
                        pa.array(values, pa.list_(pa.float32())),
                    ],
                    schema=REFERENCE,
                )
            )
            if (
                list_lengths(out[-1].column("ref_logprobs"))
                != list_lengths(b.column("completion_ids"))
            ).any():
                raise RuntimeError(f"{self!r}: log-probs and completions differ in length")
        assert start == len(rows)
        return len(out), *out

    def _forward(
        self, prompts: list[np.ndarray], completions: list[np.ndarray]
    ) -> list[np.ndarray]:
        import torch

        from actors.modeling.packing import pack

        lengths = np.array([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
        micro = pack(lengths, self.cfg.learner.micro_batch_tokens)
        found: list[Any] = [None] * len(prompts)
        with torch.no_grad():
            for m in range(int(micro.max()) + 1 if len(micro) else 0):
                members = np.flatnonzero(micro == m)
                ids = torch.zeros(len(members), int(lengths[members].max()), dtype=torch.long)
                for r, i in enumerate(members):
                    whole = np.concatenate([prompts[i], completions[i]]).astype(np.int64)
                    ids[r, : lengths[i]] = torch.from_numpy(whole)
                sizes = [len(completions[i]) for i in members]
                rows = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(sizes))
                columns = torch.cat(
                    [torch.arange(len(prompts[i]), int(lengths[i])) for i in members]
                )
                values, _ = self.policy(
                    ids.to(self.device),
                    rows.to(self.device),
                    columns.to(self.device),
                    self.cfg.rollout.temperature,
                )
                for i, piece in zip(members, values.float().cpu().split(sizes), strict=True):
                    found[i] = piece.numpy()
        return found


class ReferencePool:
    """Spreads groups over the actors. One that dies or hangs is replaced, and its work given out again.

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
        """References of REFERENCE batches, one for each ROLLOUT reference in `tables`, once all exist."""
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
        """Do jobs (actor, method, arguments ..., number of results) side by side; the references of their results, of
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
