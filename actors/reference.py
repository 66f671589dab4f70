"""Log-probs under the frozen reference policy: a pool of actors, present only when a KL term needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.records import REFERENCE, ROLLOUT, Bucket, conform, list_lengths, ragged
from cluster.environment import process_env
from cluster.remote import get

HINT = "the reference actor's log in the session's logs folder of Ray"


class Reference:
    """Ray actor. `model` is ModelConfig; log-probs are those of the distribution at `temperature`."""

    def __init__(self, index: int, cfg: Any) -> None:
        import torch

        from learner.model import Policy, load_model

        self.index, self.cfg = index, cfg
        torch.set_num_threads(max(1, cfg.reference.threads))
        self.device = "cuda" if cfg.reference.gpus else "cpu"
        self.policy = Policy(load_model(cfg.model, cfg.seed), cfg.learner.logprob_chunk_tokens).to(self.device).eval()

    def __repr__(self) -> str:
        return f"reference-{self.index}"

    def ping(self) -> int:
        return self.index

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
        from learner import tensors

        tensors.write(Path(file), {n: p.detach().cpu().contiguous() for n, p in self.policy.model.named_parameters()})

    def restore(self, file: str) -> None:
        """Read what `save` wrote."""
        import torch
        from safetensors.torch import load_file

        saved = load_file(file)
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                parameter.copy_(saved[name])

    def distributions(self, table: pa.RecordBatch, row: int, tokens: int) -> np.ndarray:
        """Log-probs float32 [K, vocabulary] at the first K <= `tokens` places of one completion, for exact KL."""
        import torch

        prompt, completion = (ragged(table.column(c))[row] for c in ("prompt_ids", "completion_ids"))
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None].to(self.device)
        columns = torch.arange(len(prompt), len(prompt) + min(tokens, len(completion)), device=self.device)
        with torch.no_grad():
            found, _ = self.policy(ids, torch.zeros_like(columns), columns, self.cfg.rollout.temperature, full=True)
        return found.float().cpu().numpy()

    def logprobs(self, tables: list[Any]) -> list[pa.RecordBatch]:
        """One REFERENCE batch for each ROLLOUT reference, rows in the same order."""
        batches = ray.get(list(tables), timeout=self.cfg.reference.timeout_s)
        rows = [(conform(b, ROLLOUT, "rollout"), i) for b in batches for i in range(b.num_rows)]
        prompts = [p for b in batches for p in ragged(b.column("prompt_ids"))]
        completions = [c for b in batches for c in ragged(b.column("completion_ids"))]
        found = self._forward(prompts, completions)
        out, start = [], 0
        for b in batches:
            values = found[start : start + b.num_rows]
            start += b.num_rows
            out.append(pa.RecordBatch.from_arrays(
                [b.column("group_id"), b.column("sample_index"), pa.array(values, pa.list_(pa.float32()))],
                schema=REFERENCE))
            if (list_lengths(out[-1].column("ref_logprobs")) != list_lengths(b.column("completion_ids"))).any():
                raise RuntimeError(f"{self!r}: log-probs and completions differ in length")
        assert start == len(rows)
        return out

    def _forward(self, prompts: list[np.ndarray], completions: list[np.ndarray]) -> list[np.ndarray]:
        import torch

        from learner.batching import pack

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
                columns = torch.cat([torch.arange(len(prompts[i]), int(lengths[i])) for i in members])
                values, _ = self.policy(ids.to(self.device), rows.to(self.device), columns.to(self.device),
                                        self.cfg.rollout.temperature)
                for i, piece in zip(members, values.float().cpu().split(sizes), strict=True):
                    found[i] = piece.numpy()
        return found


class ReferencePool:
    """Spreads groups over the actors. `start` waits until each has its model."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        r = cfg.reference
        env = process_env(r.gpus) | {"OMP_NUM_THREADS": str(max(1, r.threads))}
        actor = ray.remote(Reference)
        self.actors = [actor.options(name=f"reference-{i}", num_cpus=r.cpus, num_gpus=r.gpus,
                                     runtime_env={"env_vars": env}).remote(i, cfg) for i in range(r.count)]

    def start(self) -> None:
        get([a.ping.remote() for a in self.actors], self.cfg.reference.timeout_s, "reference: start", HINT)

    def logprobs(self, tables: list[Any]) -> list[Any]:
        """References of REFERENCE batches, one for each ROLLOUT reference in `tables`; does not wait."""
        parts = np.array_split(np.arange(len(tables)), len(self.actors))
        refs: list[Any] = []
        for actor, part in zip(self.actors, parts, strict=True):
            if len(part):
                found = actor.logprobs.options(num_returns=len(part)).remote([tables[i] for i in part])
                refs += found if isinstance(found, list) else [_single.remote(found)]
        return refs

    def wait(self, refs: list[Any]) -> None:
        """Until all log-probs exist, or DeadlineExceeded."""
        ready, pending = ray.wait(refs, num_returns=len(refs), timeout=self.cfg.reference.timeout_s, fetch_local=False)
        if pending:
            get(pending, 0.001, f"reference: log-probs of {len(pending)} of {len(refs)} groups", HINT)

    def distributions(self, table: Any, row: int, tokens: int) -> Any:
        """A reference of Reference.distributions; does not wait."""
        return self.actors[0].distributions.remote(table, row, tokens)

    def save(self, file: str) -> None:
        get(self.actors[0].save.remote(file), self.cfg.reference.timeout_s, "reference: save", HINT)

    def restore(self, file: str) -> None:
        get([a.restore.remote(file) for a in self.actors], self.cfg.reference.timeout_s, "reference: restore", HINT)

    def load(self, buckets: list[Bucket]) -> None:
        """Every actor becomes the policy of these buckets (reference reset)."""
        get([a.load.remote(buckets) for a in self.actors], self.cfg.reference.timeout_s, "reference: load", HINT)


@ray.remote(num_cpus=0)
def _single(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0]
