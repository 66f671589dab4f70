"""One DeepSpeed rank: a Ray actor that holds its share of the policy and optimizer, and trains on what it is told to.

The controller sends references to rollout tables and a plan of scalars (records.PLAN). This rank fetches the tables it
needs, forms padded micro-batches and runs them; every denominator is already in the plan's weights
(DESIGN invariant 2).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray

from actors.records import Bucket, Probe, checksum, ragged
from cluster.files import atomic
from cluster.monitoring.stat import Accumulator, Stat
from learner.algorithms import advantages
from learner.algorithms.assemble import in_learner, needs_logprobs

if TYPE_CHECKING:
    from learner.engine.samples import MicroBatch, Sample

PROBE_SEQUENCES, PROBE_TOKENS = 4, 64
Stats = Accumulator


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
    policy: bool = True  # False: only the critic learns (value pre-training)
    exact: Any = (
        None  # Reference.distributions of the first completion of the plan, or a reference to them
    )


class LearnerRank:
    """Ray actor. `cfg` is conf.schema.Config; `model_path` a directory that every rank can read."""

    def __init__(self, rank: int, world: int, cfg: Any) -> None:
        self.rank, self.world, self.cfg = rank, world, cfg

    def __repr__(self) -> str:
        return f"learner-{self.rank}"

    def rendezvous(self) -> tuple[str, int]:
        """(address, port) of this rank, where the process group will meet: kept open, on the node's own address."""
        address = ray.util.get_node_ip_address()
        self.listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        return address, self.listener.getsockname()[1]

    def join(self, address: str, port: int) -> None:
        """The process group of all ranks. PyTorch would have its store listen on every interface, and open to all."""
        import torch.distributed as dist

        limit = timedelta(seconds=self.cfg.learner.timeout_s)
        if self.rank == 0:
            store = dist.TCPStore(
                address,
                port,
                self.world,
                True,
                limit,
                wait_for_workers=False,
                master_listen_fd=self.listener.detach(),
            )
        else:
            store = dist.TCPStore(address, port, self.world, False, limit)
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=limit,
        )

    def start(self, address: str, port: int, checkpoint: str | None) -> dict[str, float]:
        """Join the process group, load the model (or a checkpoint's state) and build the DeepSpeed engine."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world),
            LOCAL_RANK="0",
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        import deepspeed
        import torch

        from actors.modeling.policy import disable_dropout
        from learner.engine import tensors

        torch.set_num_threads(self.cfg.learner.threads or max(1, int(self.cfg.learner.cpus)))
        self.on_gpu = self.cfg.learner.gpus > 0
        self.join(address, port)
        deepspeed.init_distributed(dist_backend="nccl" if self.on_gpu else "gloo")
        torch.manual_seed(self.cfg.seed)
        self.policy = self.build()
        self.policy.model.config.use_cache = False
        disable_dropout(self.policy)
        if self.cfg.learner.gradient_checkpointing:
            self.policy.model.gradient_checkpointing_enable()
        saved = Path(checkpoint) / "policy.safetensors" if checkpoint else None
        if saved:
            tensors.load_weights(saved, self.policy)
        o = self.cfg.optimizer
        self.optimizer = skippable_adamw(self.policy.parameters(), o, o.lr)
        numel = sum(p.numel() for p in self.policy.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=self.policy, optimizer=self.optimizer, config=deepspeed_config(self.cfg, numel)
        )
        tensors.prepare(self.engine, self.optimizer)
        if saved:
            tensors.load_optimizer(saved, self.policy, self.optimizer)
        self.device = self.engine.device
        self.zero3 = self.cfg.learner.zero_stage == 3
        self.probe_ids: list[list[int]] = []
        self.critic = None
        if self.cfg.algorithm.critic:
            from learner.engine.critic import Critic

            self.critic = Critic(
                self.cfg,
                self.device,
                Path(checkpoint) / "critic.safetensors" if checkpoint else None,
            )
        return {"parameters": float(numel)}

    def build(self) -> Any:
        """The module that is trained: holds a Hugging Face model as `.model`."""
        from actors.modeling.loading import load_model
        from actors.modeling.policy import Policy

        return Policy(
            load_model(self.cfg.model, self.cfg.seed), self.cfg.learner.logprob_chunk_tokens
        )

    # ---- training ---------------------------------------------------------------------------------------------

    def update(self, job: UpdateJob) -> dict[str, Any]:
        """All optimizer steps of one batch. Returns stats merged over its micro-batches, and per-step outcomes."""
        samples = self._load(job)
        stats = Stats()
        a = self.cfg.algorithm
        if (
            a.data == "sft_samples"
        ):  # generators keep the first policy, which this one leaves: nothing to compare
            job = replace(job, version=-1)
        if job.exact is not None:
            self._exact_kl(job, stats)
        if needs_logprobs(a) or len(job.micro_batches) > 1:
            # Later optimizer steps need the log-probs of the policy this batch began with; some advantages too.
            self._old_logprobs(samples, job, stats)
        if in_learner(a):
            self._late_advantages(samples, job, stats)
        steps = []
        for u, learning_rate in enumerate(job.learning_rates):
            if self.critic:
                self.critic.update(samples, job.micro_batches[u], u, stats)
            if job.policy:
                finite = self._accumulate(samples, job, u, stats)
                steps.append(self._step(learning_rate, finite))
        return {"stats": stats, "steps": steps}

    def gradient(self, job: UpdateJob) -> dict[str, np.ndarray]:
        """The gradient of optimizer step 0 as whole float32 arrays by parameter name; changes no weight. For tests."""
        from deepspeed.utils import safe_get_full_grad

        samples = self._load(job)
        if needs_logprobs(self.cfg.algorithm):
            self._old_logprobs(samples, job, Stats())
        if in_learner(self.cfg.algorithm):
            self._late_advantages(samples, job, Stats())
        self._accumulate(samples, job, 0, Stats())
        grads = {}
        for name, p in self.policy.model.named_parameters():
            grad = safe_get_full_grad(p) if self.cfg.learner.zero_stage else p.grad
            grads[name] = grad.detach().float().cpu().numpy().copy()
        self._step(0.0, False)
        return grads if self.rank == 0 else {}

    def _load(self, job: UpdateJob) -> list[Sample]:
        from learner.engine.samples import read_samples

        mine = job.plan.filter(pa.array(job.plan.column("rank").to_numpy() == self.rank))
        wanted = sorted(set(mine.column("table").to_pylist()))
        timeout = self.cfg.learner.timeout_s

        def fetch(refs: list[Any] | None) -> dict[int, pa.RecordBatch]:
            found = ray.get([refs[t] for t in wanted], timeout=timeout) if refs is not None else []
            return dict(zip(wanted, found, strict=False))

        samples = read_samples(job.plan, self.rank, fetch(job.tables), fetch(job.references))
        if samples:
            self.probe_ids = [s.ids[:PROBE_TOKENS].tolist() for s in samples[:PROBE_SEQUENCES]]
        return samples

    def _micro_batch(self, samples: list[Sample], u: int, m: int) -> MicroBatch:
        from learner.engine.samples import micro_batch

        chosen = [s for s in samples if s.update == u and s.micro_batch == m]
        return micro_batch(chosen, self.device, samples[0] if samples else None)

    def _old_logprobs(self, samples: list[Sample], job: UpdateJob, stats: Stats) -> None:
        import torch

        with torch.no_grad():
            for u, count in enumerate(job.micro_batches):
                for m in range(count):
                    batch = self._micro_batch(samples, u, m)
                    logprobs, _ = self.engine(batch.ids, batch.rows, batch.columns, job.temperature)
                    put_mismatch(stats, logprobs, batch, job.version)
                    for s, piece in zip(batch.samples, logprobs.split(batch.lengths), strict=True):
                        s.old = piece.float().cpu().numpy()
                    if self.critic:
                        self.critic.evaluate(batch)

    def _exact_kl(self, job: UpdateJob, stats: Stats) -> None:
        """KL(policy || reference) over the whole vocabulary at each place of one completion: what the estimators of
        learner/algorithms/kl.py estimate. Every rank computes it, since a forward pass may be a collective; rank 0 tells it."""
        import torch

        from learner.algorithms.kl import exact_kl

        place = job.plan.slice(0, 1).to_pylist()[0]
        table, reference = ray.get(
            [job.tables[place["table"]], job.exact], timeout=self.cfg.learner.timeout_s
        )
        prompt, completion = (
            ragged(table.column(c))[place["row"]] for c in ("prompt_ids", "completion_ids")
        )
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None].to(
            self.device
        )
        columns = torch.arange(len(prompt), len(prompt) + len(reference), device=self.device)
        with torch.no_grad():
            found, _ = self.engine(
                ids, torch.zeros_like(columns), columns, job.temperature, full=True
            )
            values = exact_kl(
                found.double(), torch.from_numpy(reference).to(self.device).double()
            ).tolist()
        if self.rank == 0:
            stats.add("kl_exact", Stat(sum(values), float(len(values)), min(values), max(values)))

    def _late_advantages(self, samples: list[Sample], job: UpdateJob, stats: Stats) -> None:
        """Advantages that need log-probs or values, or differ by token: from the whole batch, alike on every rank."""
        import torch

        a = self.cfg.algorithm
        mine = [
            (
                s.index,
                s.old - s.reference
                if s.old is not None and s.reference is not None
                else np.zeros_like(s.behaviour),
                s.values,
            )
            for s in samples
        ]
        everyone = [mine]
        if self.world > 1:
            everyone = [None] * self.world
            torch.distributed.all_gather_object(everyone, mine)
        ordered = sorted((row for part in everyone for row in part), key=lambda row: row[0])
        kl = [row[1].astype(np.float64) for row in ordered]
        values = [row[2].astype(np.float64) for row in ordered] if self.critic else None
        column = {
            n: job.plan.column(n).to_numpy(zero_copy_only=False)
            for n in ("reward", "group_id", "valid")
        }
        step = {
            n: [x or [] for x in job.plan.column(n).to_pylist()]
            for n in ("step_rewards", "step_ends")
        }
        found = advantages.compute(
            a,
            column["reward"],
            column["group_id"],
            column["valid"],
            lengths=np.array([len(k) for k in kl]),
            kl=kl,
            values=values,
            log_ratios=np.array([k.sum() for k in kl]),
            **step,
        )
        for s in samples:
            s.advantage = found[s.index] if isinstance(found, list) else float(found[s.index])
        if self.critic:
            self.critic.set_targets(
                samples, column["reward"], column["valid"], kl, values, stats, self.rank == 0
            )

    def _accumulate(self, samples: list[Sample], job: UpdateJob, u: int, stats: Stats) -> bool:
        """Forward and backward of optimizer step u; returns whether every rank's loss was finite."""
        from learner.algorithms.losses import policy_loss

        a = self.cfg.algorithm

        def loss(m: int) -> tuple[Any, Stats, bool]:
            b = self._micro_batch(samples, u, m)
            logprobs, entropy = self.engine(
                b.ids, b.rows, b.columns, job.temperature, True, a.entropy_coef != 0
            )
            old = b.flat("old")
            if old is None:
                put_mismatch(stats, logprobs, b, job.version)
            value, found = policy_loss(
                a,
                b.pad(logprobs),
                b.pad(old),
                b.advantages(),
                b.weights(),
                b.mask(),
                b.pad(b.flat("reference")),
                b.pad(entropy),
                b.pad(b.flat("behaviour")),
            )
            total = float(value)
            return value, found | {"loss": Stat(total, 1.0 / self.world, total, total)}, b.empty

        return accumulate(self.engine, job.micro_batches[u], loss, stats)

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

    # ---- weights ----------------------------------------------------------------------------------------------

    def publish(
        self, limit: int, tolerance: float, probe_ids: list[list[int]] | None
    ) -> dict[str, Any] | None:
        """Put the weights into the object store, bucket by bucket; rank 0 returns the buckets and a probe.

        `limit`: bytes a bucket. The probe is the head of a few of the last trained samples (or `probe_ids`)."""
        import torch

        from learner.engine.weights import buckets, flatten, gathered

        self.probe_ids = probe_ids or self.probe_ids
        if (
            self.zero3 and self.world > 1
        ):  # a forward pass is a collective: all ranks must make the same ones
            shared = [self.probe_ids]
            torch.distributed.broadcast_object_list(shared, src=0)
            self.probe_ids = shared[0]
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
        return (
            {"buckets": out, "probe": Probe(self.probe_ids, logprobs, tolerance)}
            if self.rank == 0
            else None
        )

    def save_state(self, folder: str) -> None:
        """Weights and optimizer state of policy and critic, as a checkpoint holds them (learner/engine/tensors.py)."""
        from learner.engine import tensors

        there = Path(folder)
        tensors.save(there / "policy.safetensors", self.policy, self.optimizer, self.rank)
        if self.critic:
            tensors.save(
                there / "critic.safetensors", self.critic.model, self.critic.optimizer, self.rank
            )

    def save_model(self, directory: str, tokenizer: Any) -> None:
        """Write the policy as a Hugging Face directory (safetensors). Every rank must call this;
        rank 0 writes. A directory of this name, from an earlier end of a resumed run, is replaced."""
        from learner.engine.weights import buckets, gathered

        state = {}
        for group in buckets(list(self.policy.model.named_parameters()), 1 << 28):
            with gathered([p for _, p in group], self.zero3):
                if self.rank == 0:
                    state.update({n: p.detach().cpu().clone() for n, p in group})
        if self.rank == 0:
            with atomic(Path(directory)) as partial:
                self.policy.model.save_pretrained(partial, state_dict=state)
                tokenizer.save_pretrained(partial)
                self.policy.save_extra_files(partial)


def accumulate(
    engine: Any, count: int, loss: Callable[[int], tuple[Any, Stats, bool]], stats: Stats
) -> bool:
    """Forward and backward of one optimizer step of `count` micro-batches; whether every rank's loss was finite.

    `loss(m)`: of micro-batch m, its statistics, and whether it is an empty one that only keeps ranks in step."""
    import torch

    world, finite = torch.distributed.get_world_size(), torch.ones(1, device=engine.device)
    for m in range(count):
        # DeepSpeed would count micro-batches itself and step too early or too late (OpenRLHF#1131).
        engine.set_gradient_accumulation_boundary(m == count - 1)
        value, found, empty = loss(m)
        if not empty:
            stats.merge(found)
        finite *= float(torch.isfinite(value.detach()))
        engine.backward(
            value * world
        )  # DeepSpeed averages over ranks; the weights already sum over them
    if world > 1:
        torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
    return bool(finite.item())


def put_mismatch(stats: Stats, logprobs: Any, batch: MicroBatch, version: int) -> None:
    """|learner - generator| log-prob of tokens sampled by this very version: what weight sync must keep near 0."""
    same = batch.flat("versions", np.int64) == version
    if bool(same.any()):
        diff = (logprobs.detach() - batch.flat("behaviour"))[same].abs().double()
        stats.add(
            "mismatch",
            Stat(float(diff.sum()), float(diff.numel()), float(diff.min()), float(diff.max())),
        )


def deepspeed_config(cfg: Any, numel: int) -> dict[str, Any]:
    """DeepSpeed's configuration from ours. Accumulation is steered by hand, so its own counts are all 1."""
    bucket = int(
        min(5e8, max(numel, 1024))
    )  # the default would allocate gigabytes for a model of any size
    zero: dict[str, Any] = {"stage": cfg.learner.zero_stage}
    if cfg.learner.zero_stage:
        zero |= {"reduce_bucket_size": bucket, "overlap_comm": False}
    if cfg.learner.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "gradient_clipping": cfg.optimizer.grad_clip,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": cfg.model.dtype == "bfloat16"},
        "steps_per_print": 1 << 60,
    }


def skippable_adamw(parameters: Any, o: Any, lr: float) -> Any:
    """AdamW of OptimizerConfig `o` that can sit out a step: DeepSpeed clears gradients as always, weights and moments
    stay."""
    import torch

    class SkippableAdamW(torch.optim.AdamW):
        skip = False

        def step(self, closure: Any = None) -> Any:
            return None if self.skip else super().step(closure)

    return SkippableAdamW(
        parameters, lr=lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
    )
