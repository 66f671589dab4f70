"""One DeepSpeed rank: a Ray actor that holds its share of the policy and optimizer, and trains it.

The controller sends object references of rollout tables and a plan of scalars (records.PLAN). The
rank fetches the tables that it needs, forms padded micro-batches and runs them. The weights in the
plan already contain every denominator of the loss (DESIGN invariant 2).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray

from actors.records import Bucket, Probe, checksum
from cluster.monitoring.stat import Accumulator, Stat
from learner.algorithms import advantages
from learner.algorithms.assemble import in_learner, needs_logprobs
from learner.engine.job import UpdateJob

if TYPE_CHECKING:
    from learner.engine.samples import Sample

# New weights are probed with the first tokens of some of the sequences that were trained on.
PROBE_SEQUENCES, PROBE_TOKENS = 4, 64


class LearnerRank:
    """Ray actor. `cfg`: conf.schema.Config. cfg.model.path must be readable by every rank."""

    def __init__(self, rank: int, world: int, cfg: Any) -> None:
        self.rank, self.world, self.cfg = rank, world, cfg

    def __repr__(self) -> str:
        return f"learner-{self.rank}"

    # ---- start -----------------------------------------------------------------------------------

    def rendezvous(self) -> tuple[str, int]:
        """Open the socket at which the process group will meet; return its (address, port).

        It listens on the node's own address only.
        """
        address = ray.util.get_node_ip_address()
        self.listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        return address, self.listener.getsockname()[1]

    def join(self, address: str, port: int) -> None:
        """Join the process group of all ranks.

        The store takes over the socket of `rendezvous`. PyTorch's own would listen on every
        interface.
        """
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
        """Join the process group, load the model and build the DeepSpeed engine.

        checkpoint: folder of the state to load, or None. Returns {"parameters": their number}.
        """
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
        from learner.engine.critic import Critic
        from learner.engine.optimizer import build_engine

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
        folder = Path(checkpoint) if checkpoint else None
        parameters = sum(p.numel() for p in self.policy.parameters())
        self.engine, self.optimizer = build_engine(
            self.cfg,
            self.policy,
            self.cfg.optimizer.lr,
            folder / "policy.safetensors" if folder else None,
        )
        self.device = self.engine.device
        self.zero3 = self.cfg.learner.zero_stage == 3
        self.probe_ids: list[list[int]] = []
        self.critic = None
        if self.cfg.algorithm.critic:
            saved = folder / "critic.safetensors" if folder else None
            self.critic = Critic(self.cfg, self.device, saved)
        return {"parameters": float(parameters)}

    def build(self) -> Any:
        """Return the module that is trained. It holds a Hugging Face model as `.model`."""
        from actors.modeling.loading import load_model
        from actors.modeling.policy import Policy

        return Policy(
            load_model(self.cfg.model, self.cfg.seed), self.cfg.learner.logprob_chunk_tokens
        )

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        """Return the values of object references. Raises Ray's error after learner.timeout_s."""
        return ray.get(list(refs), timeout=self.cfg.learner.timeout_s)

    # ---- training --------------------------------------------------------------------------------

    def update(self, job: UpdateJob) -> dict[str, Any]:
        """Make all optimizer steps of one batch.

        Returns {"stats": this rank's Stats by name, "steps": one dict for each optimizer step with
        grad_norm, skipped and learning_rate}.
        """
        if self.cfg.algorithm.data == "sft_samples":
            # The generators keep the initial policy, so their log-probs say nothing about mismatch.
            job = replace(job, version=-1)
        stats = Accumulator()
        samples = self.prepare(job, stats)
        steps = []
        for u, learning_rate in enumerate(job.learning_rates):
            if self.critic:
                self.critic.update(samples, job.micro_batches[u], u, stats)
            if job.policy:
                finite = self.accumulate(samples, job, u, stats)
                steps.append(self.step(learning_rate, finite))
        return {"stats": stats, "steps": steps}

    def prepare(self, job: UpdateJob, stats: Accumulator) -> list[Sample]:
        """Return this rank's samples with all that the loss needs; changes no weight.

        That is the diagnostics, the old log-probs where later optimizer steps or the advantages
        depend on them, and the advantages that the controller could not compute.
        """
        samples = self.load_samples(job)
        for diagnostic in job.diagnostics:
            stats.merge(diagnostic.measure(self, job))
        if needs_logprobs(self.cfg.algorithm) or len(job.micro_batches) > 1:
            self.set_old_logprobs(samples, job, stats)
        if in_learner(self.cfg.algorithm):
            self.set_advantages(samples, job, stats)
        return samples

    def load_samples(self, job: UpdateJob) -> list[Sample]:
        """Fetch the tables that this rank needs, and return its samples."""
        from learner.engine.samples import read_samples

        mine = job.plan.filter(pa.array(job.plan.column("rank").to_numpy() == self.rank))
        needed = sorted(set(mine.column("table").to_pylist()))

        def fetch(refs: list[Any] | None) -> dict[int, pa.RecordBatch]:
            batches = self.fetch([refs[t] for t in needed]) if refs is not None else []
            return dict(zip(needed, batches, strict=False))

        samples = read_samples(job.plan, self.rank, fetch(job.tables), fetch(job.references))
        if samples:
            self.probe_ids = [
                s.sequence.ids[:PROBE_TOKENS].tolist() for s in samples[:PROBE_SEQUENCES]
            ]
        return samples

    def set_old_logprobs(self, samples: list[Sample], job: UpdateJob, stats: Accumulator) -> None:
        """Set each sample's log-probs under the present policy, and its values under the critic."""
        import torch

        from learner.engine.samples import micro_batch

        with torch.no_grad():
            for u, count in enumerate(job.micro_batches):
                for m in range(count):
                    batch = micro_batch(samples, u, m, self.device)
                    p = batch.packed
                    logprobs, _ = self.engine(p.ids, p.rows, p.columns, job.temperature)
                    stats.merge(batch.mismatch(logprobs, job.version))
                    old = p.split(logprobs.float())
                    for sample, sample_logprobs in zip(batch.samples, old, strict=True):
                        sample.old = sample_logprobs
                    if self.critic:
                        self.critic.evaluate(batch)

    def set_advantages(self, samples: list[Sample], job: UpdateJob, stats: Accumulator) -> None:
        """Set the advantages that need log-probs or values, or that differ by token.

        They depend on the whole batch, so the ranks exchange their samples' log-ratios and values.
        Every rank then computes the advantages of all samples, and keeps its own.
        """
        plan = job.plan
        log_ratios, values = self._gather_token_columns(samples)
        rewards, groups, valid = (
            plan.column(n).to_numpy(zero_copy_only=False) for n in ("reward", "group_id", "valid")
        )
        steps = {
            n: [x or [] for x in plan.column(n).to_pylist()] for n in ("step_rewards", "step_ends")
        }
        computed = advantages.compute(
            self.cfg.algorithm,
            rewards,
            groups,
            valid,
            lengths=np.array([len(r) for r in log_ratios]),
            kl=log_ratios,
            values=values,
            log_ratios=np.array([r.sum() for r in log_ratios]),
            **steps,
        )
        by_token = isinstance(computed, list)
        for s in samples:
            s.advantage = computed[s.index] if by_token else float(computed[s.index])
        if self.critic:
            explained = self.critic.set_targets(samples, rewards, valid, log_ratios, values)
            if self.rank == 0:
                stats.add("explained_variance", explained)

    def _gather_token_columns(
        self, samples: list[Sample]
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Return (log(pi/pi_ref), values) of every sample of the batch, in the plan's order.

        Each is a list of float64 [K]. Log-ratios are 0 without a reference; values are None without
        a critic.
        """
        import torch

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
        log_ratios = [row[1].astype(np.float64) for row in ordered]
        values = [row[2].astype(np.float64) for row in ordered] if self.critic else None
        return log_ratios, values

    def accumulate(self, samples: list[Sample], job: UpdateJob, u: int, stats: Accumulator) -> bool:
        """Run forward and backward of optimizer step u; return whether all ranks' loss was
        finite."""
        from learner.algorithms.losses import policy_loss
        from learner.engine.accumulation import accumulate
        from learner.engine.samples import micro_batch

        a = self.cfg.algorithm

        def loss(m: int) -> tuple[Any, Mapping[str, Stat], bool]:
            b = micro_batch(samples, u, m, self.device)
            p = b.packed
            logprobs, entropy = self.engine(
                p.ids, p.rows, p.columns, job.temperature, True, a.entropy_coef != 0
            )
            old = b.flat("old")
            if old is None:
                stats.merge(b.mismatch(logprobs, job.version))
            value, loss_stats = policy_loss(
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
            return value, loss_stats | self.total_loss(value), b.filler

        return accumulate(self.engine, job.micro_batches[u], loss, stats)

    def total_loss(self, value: Any) -> dict[str, Stat]:
        """Return {"loss": Stat of a micro-batch's share of the loss}.

        Its sum over micro-batches and ranks is the loss of the optimizer steps. The counts of one
        micro-batch on every rank add up to 1.
        """
        total = float(value)
        return {"loss": Stat(total, 1.0 / self.world, total, total)}

    def step(self, learning_rate: float, finite: bool) -> dict[str, float]:
        """Make one optimizer step of the policy (see learner.engine.optimizer.optimizer_step)."""
        from learner.engine.optimizer import optimizer_step

        return optimizer_step(self.engine, self.optimizer, learning_rate, finite)

    # ---- weights ---------------------------------------------------------------------------------

    def publish(
        self, limit: int, tolerance: float, probe_ids: list[list[int]] | None
    ) -> dict[str, Any] | None:
        """Put the weights into the object store, bucket by bucket.

        limit: bytes of a bucket. Rank 0 returns {"buckets": list of Bucket, "probe": Probe}, the
        others None. The probe is made of `probe_ids`, or of the heads of some of the samples that
        were trained on last.
        tolerance: how far a generator's log-probs may be from the probe's.
        """
        import torch

        from learner.engine.weights import flatten, probe_logprobs, whole_parameters

        self.probe_ids = probe_ids or self.probe_ids
        if self.zero3 and self.world > 1:
            # A forward pass is a collective, so all ranks must run the same sequences.
            shared = [self.probe_ids]
            torch.distributed.broadcast_object_list(shared, src=0)
            self.probe_ids = shared[0]
        published = []
        for group in whole_parameters(self.policy.model, limit, self.rank, self.zero3):
            buffer, entries = flatten(group)
            published.append(Bucket(ray.put(buffer), entries, checksum(buffer)))
        if self.rank != 0 and not self.zero3:
            return None
        logprobs = probe_logprobs(self.engine, self.probe_ids, self.device)
        if self.rank != 0:
            return None
        return {"buckets": published, "probe": Probe(self.probe_ids, logprobs, tolerance)}

    def save_state(self, folder: str) -> None:
        """Write weights and optimizer state of policy and critic (see learner.engine.tensors)."""
        from learner.engine import tensors

        path = Path(folder)
        tensors.save(path / "policy.safetensors", self.policy, self.optimizer, self.rank)
        if self.critic:
            tensors.save(
                path / "critic.safetensors", self.critic.model, self.critic.optimizer, self.rank
            )

    def save_model(self, directory: str, tokenizer: Any) -> None:
        """Write the policy as a Hugging Face directory (see learner.engine.weights.save_model)."""
        from learner.engine.weights import save_model

        save_model(self.policy, Path(directory), tokenizer, self.rank, self.zero3)
