"""One DeepSpeed rank: a Ray actor that holds its share of the policy and optimizer, and trains on what it is told to.

The controller sends references to rollout tables and a plan of scalars (records.PLAN). This rank fetches the tables it
needs, forms padded micro-batches and runs them; every denominator is already in the plan's weights
(DESIGN invariant 2).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from actors.records import Bucket, Probe, checksum, ragged

PROBE_SEQUENCES, PROBE_TOKENS = 4, 64
Stats = dict[str, tuple[float, float, float, float]]  # name -> (sum, count, min, max)


@dataclass(frozen=True)
class UpdateJob:
    """One batch of rollouts. `tables`, `references`: object references of ROLLOUT / REFERENCE batches, index-aligned;
    `plan`: records.PLAN; `micro_batches[u]`: how many each rank runs in optimizer step u; `learning_rates[u]`."""

    version: int
    tables: list[Any]
    references: list[Any] | None
    plan: pa.RecordBatch
    micro_batches: tuple[int, ...]
    learning_rates: tuple[float, ...]
    temperature: float


@dataclass
class _Sample:
    ids: np.ndarray  # int32 [prompt + completion]
    prompt: int  # prompt tokens
    behaviour: np.ndarray  # float32 [completion]
    versions: np.ndarray  # int32 [completion]
    advantage: float
    weight: float
    reference: np.ndarray | None = None
    old: np.ndarray | None = field(default=None)


class LearnerRank:
    """Ray actor. `cfg` is learner.config.Config; `model_path` a directory that every rank can read."""

    def __init__(self, rank: int, world: int, cfg: Any) -> None:
        self.rank, self.world, self.cfg = rank, world, cfg

    def __repr__(self) -> str:
        return f"learner-{self.rank}"

    def rendezvous(self) -> tuple[str, int]:
        """(address, free port) of this rank's node, for the process group."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def start(self, address: str, port: int) -> dict[str, float]:
        """Join the process group, load the model and build the DeepSpeed engine."""
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world), LOCAL_RANK="0", MASTER_ADDR=address,
                          MASTER_PORT=str(port))
        import deepspeed
        import torch

        from learner.model import Policy, load_model

        torch.set_num_threads(self.cfg.learner.threads or max(1, int(self.cfg.learner.cpus)))
        self.on_gpu = self.cfg.learner.gpus > 0
        deepspeed.init_distributed(dist_backend="nccl" if self.on_gpu else "gloo")
        torch.manual_seed(self.cfg.seed)
        model = load_model(self.cfg.model, self.cfg.seed)
        model.config.use_cache = False
        if self.cfg.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.policy = Policy(model, self.cfg.learner.logprob_chunk_tokens)
        o = self.cfg.optimizer
        self.optimizer = _skippable_adamw()(self.policy.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps,
                                            weight_decay=o.weight_decay)
        numel = sum(p.numel() for p in self.policy.parameters())
        self.engine, *_ = deepspeed.initialize(model=self.policy, optimizer=self.optimizer,
                                               config=deepspeed_config(self.cfg, numel))
        self.device = self.engine.device
        self.zero3 = self.cfg.learner.zero_stage == 3
        self.probe_ids: list[list[int]] = []
        return {"parameters": float(numel)}

    # ---- training ---------------------------------------------------------------------------------------------

    def update(self, job: UpdateJob) -> dict[str, Any]:
        """All optimizer steps of one batch. Returns stats merged over its micro-batches, and per-step outcomes."""
        samples, update, micro = self._load(job)
        stats: Stats = {}
        if len(job.micro_batches) > 1:  # later steps need the log-probs of the policy this batch began with
            self._old_logprobs(samples, job, update, micro, stats)
        steps = []
        for u, learning_rate in enumerate(job.learning_rates):
            finite = self._accumulate(samples, job, u, update, micro, stats)
            steps.append(self._step(learning_rate, finite))
        return {"stats": stats, "steps": steps}

    def gradient(self, job: UpdateJob) -> dict[str, np.ndarray]:
        """The gradient of optimizer step 0 as whole float32 arrays by parameter name; changes no weight. For tests."""
        from deepspeed.utils import safe_get_full_grad

        samples, update, micro = self._load(job)
        self._accumulate(samples, job, 0, update, micro, {})
        grads = {}
        for name, p in self.policy.model.named_parameters():
            grad = safe_get_full_grad(p) if self.cfg.learner.zero_stage else p.grad
            grads[name] = grad.detach().float().cpu().numpy().copy()
        self._step(0.0, False)
        return grads if self.rank == 0 else {}

    def _load(self, job: UpdateJob) -> tuple[list[_Sample], np.ndarray, np.ndarray]:
        plan = job.plan.filter(pc.equal(job.plan.column("rank"), self.rank))
        col = {n: plan.column(n).to_numpy() for n in ("table", "row", "advantage", "weight", "update", "micro_batch")}
        timeout = self.cfg.learner.timeout_s
        wanted = sorted(set(col["table"].tolist()))
        tables = dict(zip(wanted, ray.get([job.tables[t] for t in wanted], timeout=timeout), strict=True))
        refs = {} if job.references is None else dict(
            zip(wanted, ray.get([job.references[t] for t in wanted], timeout=timeout), strict=True))
        columns = {t: {n: ragged(b.column(n)) for n in ("prompt_ids", "completion_ids", "behaviour_logprobs",
                                                        "versions")} for t, b in tables.items()}
        ref_columns = {t: ragged(b.column("ref_logprobs")) for t, b in refs.items()}
        samples = []
        for t, row, advantage, weight in zip(col["table"], col["row"], col["advantage"], col["weight"], strict=True):
            c = columns[t]
            samples.append(_Sample(
                np.concatenate([c["prompt_ids"][row], c["completion_ids"][row]]), len(c["prompt_ids"][row]),
                c["behaviour_logprobs"][row], c["versions"][row], float(advantage), float(weight),
                ref_columns[t][row] if refs else None))
        if samples:
            self.probe_ids = [s.ids[:PROBE_TOKENS].tolist() for s in samples[:PROBE_SEQUENCES]]
        return samples, col["update"], col["micro_batch"]

    def _old_logprobs(self, samples: list[_Sample], job: UpdateJob, update: np.ndarray, micro: np.ndarray,
                      stats: Stats) -> None:
        import torch

        with torch.no_grad():
            for u, count in enumerate(job.micro_batches):
                for m in range(count):
                    batch = self._batch(samples, np.flatnonzero((update == u) & (micro == m)))
                    logprobs, _ = self.engine(batch["ids"], batch["rows"], batch["columns"], job.temperature)
                    put_mismatch(stats, logprobs, batch, job.version)
                    for s, piece in zip(batch["samples"], logprobs.split(batch["lengths"]), strict=True):
                        s.old = piece.float().cpu().numpy()

    def _accumulate(self, samples: list[_Sample], job: UpdateJob, u: int, update: np.ndarray, micro: np.ndarray,
                    stats: Stats) -> bool:
        """Forward and backward of optimizer step u; returns whether every rank's loss was finite."""
        import torch

        from learner.losses import policy_loss

        a = self.cfg.algorithm
        finite = torch.ones(1)
        for m in range(job.micro_batches[u]):
            # DeepSpeed would count micro-batches itself and step too early or too late (OpenRLHF#1131).
            self.engine.set_gradient_accumulation_boundary(m == job.micro_batches[u] - 1)
            batch = self._batch(samples, np.flatnonzero((update == u) & (micro == m)))
            logprobs, entropy = self.engine(batch["ids"], batch["rows"], batch["columns"], job.temperature, True,
                                            a.entropy_coef != 0)
            if batch["samples"][0].old is None:
                put_mismatch(stats, logprobs, batch, job.version)
            pad = batch["pad"]
            loss, found = policy_loss(
                a, pad(logprobs), pad(batch["old"]), batch["advantages"], batch["weights"], pad(
                    torch.ones_like(logprobs)), pad(batch["reference"]), pad(entropy), pad(batch["behaviour"]))
            if not batch["empty"]:
                merge(stats, found)
                merge(stats, {"loss": (float(loss), 1.0 / self.world, float(loss), float(loss))})
            finite *= float(torch.isfinite(loss.detach()))
            self.engine.backward(loss * self.world)  # DeepSpeed averages over ranks; the weights already sum over them
        if self.world > 1:
            torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
        return bool(finite.item())

    def _step(self, learning_rate: float, finite: bool) -> dict[str, float]:
        """One optimizer step, skipped on all ranks alike when anything is not finite; weights then stay as they are."""
        import torch

        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = None
        if not self.cfg.learner.zero_stage:  # gradients are whole and equal on all ranks here
            grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(grads))
            finite = finite and bool(np.isfinite(norm))
        self.optimizer.skip = not finite
        self.engine.step()
        self.optimizer.skip = False
        if norm is None:
            norm = float(self.engine.get_global_grad_norm() or 0.0)
            finite = finite and not self.engine.optimizer.overflow
        return {"grad_norm": norm, "skipped": float(not finite), "learning_rate": learning_rate}

    def _batch(self, samples: list[_Sample], members: np.ndarray) -> dict[str, Any]:
        """Right-padded tensors of the chosen samples; no sample gives one row of weight 0 (ZeRO's collectives)."""
        import torch

        chosen = [samples[i] for i in members]
        empty = not chosen
        if empty:
            chosen = [_Sample(np.zeros(2, np.int32), 1, np.zeros(1, np.float32), np.full(1, -1, np.int32), 0.0, 0.0,
                              np.zeros(1, np.float32), np.zeros(1, np.float32))]
        width = max(len(s.ids) for s in chosen)
        ids = np.zeros((len(chosen), width), np.int64)
        for i, s in enumerate(chosen):
            ids[i, : len(s.ids)] = s.ids
        lengths = [len(s.ids) - s.prompt for s in chosen]
        rows = np.repeat(np.arange(len(chosen)), lengths)
        columns = np.concatenate([np.arange(s.prompt, len(s.ids)) for s in chosen])
        place = columns - np.repeat([s.prompt for s in chosen], lengths)

        def tensor(value: np.ndarray) -> Any:
            return torch.from_numpy(np.ascontiguousarray(value)).to(self.device)

        def flat(name: str) -> Any:
            values = [getattr(s, name) for s in chosen]
            return None if values[0] is None else tensor(np.concatenate(values))

        rows_t, place_t = tensor(rows), tensor(place)

        def pad(value: Any) -> Any:
            return None if value is None else value.new_zeros(len(chosen), max(lengths)).index_put((rows_t, place_t),
                                                                                                 value)

        return {"samples": chosen, "empty": empty, "lengths": lengths, "ids": tensor(ids), "rows": rows_t,
                "columns": tensor(columns), "behaviour": flat("behaviour"), "versions": flat("versions"),
                "reference": flat("reference"), "old": flat("old"), "pad": pad,
                "advantages": tensor(np.array([s.advantage for s in chosen], np.float32)),
                "weights": tensor(np.array([s.weight for s in chosen], np.float64))}

    # ---- weights ----------------------------------------------------------------------------------------------

    def publish(self, limit: int, tolerance: float, probe_ids: list[list[int]] | None) -> dict[str, Any] | None:
        """Put the weights into the object store, bucket by bucket; rank 0 returns the buckets and a probe.

        `limit`: bytes a bucket. The probe is the head of a few of the last trained samples (or `probe_ids`)."""
        import torch

        from learner.weights import buckets, flatten, gathered

        self.probe_ids = probe_ids or self.probe_ids
        out = []
        if self.rank == 0 or self.zero3:
            for group in buckets(list(self.policy.model.named_parameters()), limit):
                with gathered([p for _, p in group], self.zero3):
                    if self.rank == 0:
                        buffer, entries = flatten(group)
                        out.append(Bucket(ray.put(buffer), entries, checksum(buffer)))
        logprobs = []
        with torch.no_grad():
            for ids in self.probe_ids if (self.rank == 0 or self.zero3) else []:
                x = torch.tensor([ids], device=self.device)
                columns = torch.arange(1, len(ids), device=self.device)
                found, _ = self.engine(x, torch.zeros_like(columns), columns)
                logprobs.append(found.float().cpu().numpy())
        return {"buckets": out, "probe": Probe(self.probe_ids, logprobs, tolerance)} if self.rank == 0 else None

    def save_model(self, directory: str, tokenizer: Any) -> None:
        """Write the policy as a Hugging Face directory (safetensors), beside and then renamed, by rank 0."""
        from learner.weights import buckets, gathered

        state = {}
        for group in buckets(list(self.policy.model.named_parameters()), 1 << 28):
            with gathered([p for _, p in group], self.zero3):
                if self.rank == 0:
                    state.update({n: p.detach().cpu().clone() for n, p in group})
        if self.rank == 0:
            beside = Path(directory + ".partial")
            self.policy.model.save_pretrained(beside, state_dict=state)
            tokenizer.save_pretrained(beside)
            beside.rename(directory)


def put_mismatch(stats: Stats, logprobs: Any, batch: dict[str, Any], version: int) -> None:
    """|learner - generator| log-prob of tokens sampled by this very version: what weight sync must keep near 0."""
    same = batch["versions"] == version
    if bool(same.any()):
        diff = (logprobs.detach() - batch["behaviour"])[same].abs().double()
        merge(stats, {"mismatch": (float(diff.sum()), float(diff.numel()), float(diff.min()), float(diff.max()))})


def merge(stats: Stats, other: Stats) -> None:
    """Fold `other` into `stats`: sums and counts add, minima and maxima stay what they are (DESIGN invariant 9)."""
    for name, (total, count, low, high) in other.items():
        t, c, lo, hi = stats.get(name, (0.0, 0.0, float("inf"), float("-inf")))
        stats[name] = (t + total, c + count, min(lo, low), max(hi, high))


def deepspeed_config(cfg: Any, numel: int) -> dict[str, Any]:
    """DeepSpeed's configuration from ours. Accumulation is steered by hand, so its own counts are all 1."""
    bucket = int(min(5e8, max(numel, 1024)))  # the default would allocate gigabytes for a model of any size
    zero: dict[str, Any] = {"stage": cfg.learner.zero_stage}
    if cfg.learner.zero_stage:
        zero |= {"reduce_bucket_size": bucket, "overlap_comm": False}
    if cfg.learner.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero,
            "gradient_clipping": cfg.optimizer.grad_clip, "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": cfg.model.dtype == "bfloat16"}, "steps_per_print": 1 << 60}


def _skippable_adamw() -> type:
    import torch

    class SkippableAdamW(torch.optim.AdamW):
        """AdamW that can sit out a step: DeepSpeed clears its gradients as always, weights and moments stay."""

        skip = False

        def step(self, closure: Any = None) -> Any:
            return None if self.skip else super().step(closure)

    return SkippableAdamW
