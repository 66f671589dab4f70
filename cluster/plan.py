"""What a run needs, on paper: memory of one machine, disk for checkpoints, room in the object store. Pure; in bytes.

Estimates, made to tell a run that cannot fit from one that can, and to say which part is the large one. What lives on a
GPU (learner.gpus, generator.gpus, reference.gpus, reward_model.gpus above 0) is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}
# Private memory of a process beside its model, cache and activations, as seen on Linux with the CPU builds; "services"
# are Ray's own processes, the reward service and the writer of rollouts.
PROCESS = {
    "learner": 600 * MIB,
    "generator": 1450 * MIB,
    "reference": 350 * MIB,
    "reward": 100 * MIB,
    "reward_model": 350 * MIB,
    "services": 1200 * MIB,
}
# Values kept for backward, per token, layer and hidden unit, attention matrices not stored (arXiv 2205.05198, eq. 2: 34
# bytes at 2 bytes a value).
ACTIVATIONS = 17


@dataclass(frozen=True)
class ModelSize:
    """`parameters` counts tied ones once; `layers`, `hidden`, `vocabulary` are 0 where the config does not say."""

    parameters: int
    layers: int = 0
    hidden: int = 0
    vocabulary: int = 0
    frozen: int = (
        0  # parameters beside them that are never trained: an implicit reward model's reference
    )


def has_reference(cfg: Any) -> bool:
    return cfg.stage == "rl" and cfg.algorithm.beta > 0 and cfg.algorithm.kl_placement != "none"


def memory(
    cfg: Any, size: ModelSize, rewards: Mapping[str, ModelSize] | None = None
) -> dict[str, int]:
    """Bytes of each part that must be resident at once on the one machine of a local cluster.

    `cfg`: conf.schema.Config; `rewards`: sizes of reward.models by name, as far as they are served. AdamW keeps two
    float32 moments, and a float32 master copy where weights are held in less or are sharded. ZeRO 1 shards the
    optimizer's part over the ranks, 2 gradients too, 3 weights too; ranks share the machine, so what is not sharded is
    there once a rank. vLLM on a CPU keeps weights twice: as loaded, and packed.
    """
    n, b, lr, g, rm = (
        size.parameters,
        BYTES[cfg.model.dtype],
        cfg.learner,
        cfg.generator,
        cfg.reward_model,
    )
    sampled, models = cfg.generates, 2 if cfg.algorithm.critic and cfg.stage == "rl" else 1
    rewards = rewards or {}
    refreshed = (
        rewards.get(rm.refresh) if rm.every or rm.initial else None
    )  # trained beside the policy

    def trained(parameters: int) -> list[int]:
        """Weights, gradients, optimizer state."""
        moments = 8 + (4 if b < 4 or lr.zero_stage else 0)
        return [
            parameters * each * (1 if lr.zero_stage >= sharded_from else lr.ranks)
            for each, sharded_from in ((b, 3), (b, 2), (moments, 1))
        ]

    parts: dict[str, int] = {}
    if not lr.gpus:
        parts |= zip(
            ("learner weights", "gradients", "optimizer state"), trained(models * n), strict=True
        )
        parts |= (
            {"reward learner": sum(trained(refreshed.parameters)) + refreshed.frozen * b * lr.ranks}
            if refreshed
            else {}
        )
        parts |= (
            {"reward reference": n * b * lr.ranks}
            if cfg.stage == "reward_model" and rm.head == "implicit"
            else {}
        )
    if has_reference(cfg) and not cfg.reference.gpus:
        parts["reference"] = n * b * cfg.reference.count
    if rewards and not rm.gpus:
        parts["reward models"] = (
            sum(m.parameters + m.frozen for m in rewards.values()) * b * rm.count
        )
    if sampled and not g.gpus:
        parts["generator weights"] = 2 * n * b * g.count
        parts["generator cache"] = (
            max(1, round(g.kv_cache_gib)) * GIB * g.count
        )  # whole GiB (cluster/environment.py)
    parts["object store"] = cfg.cluster.object_store_mib * MIB
    count = {
        "learner": lr.ranks * (2 if refreshed else 1),
        "generator": g.count * sampled,
        "services": 1,
        "reward": cfg.reward.workers * sampled,
        "reward_model": rm.count * bool(rewards),
        "reference": cfg.reference.count * has_reference(cfg),
    }
    parts["processes"] = sum(PROCESS[kind] * n for kind, n in count.items())
    return parts


def passing(cfg: Any, size: ModelSize) -> dict[str, int]:
    """Bytes that come and go in a training step: activations of a micro-batch, and logits of a chunk with gradient."""
    lr, b = cfg.learner, BYTES[cfg.model.dtype]
    if lr.gpus:
        return {}
    kept = size.layers + ACTIVATIONS if lr.gradient_checkpointing else size.layers * ACTIVATIONS
    return {
        "activations": lr.micro_batch_tokens * size.hidden * kept * b * lr.ranks,
        "logits": 3
        * 4
        * min(lr.logprob_chunk_tokens, lr.micro_batch_tokens)
        * size.vocabulary
        * lr.ranks,
    }


def published(cfg: Any, size: ModelSize) -> int:
    """Bytes one version of the weights takes in the object store."""
    return size.parameters * BYTES[cfg.model.dtype]


def checkpoint(cfg: Any, size: ModelSize) -> int:
    """Bytes of one checkpoint: weights and both moments of policy (and critic) in float32; a reset reference too."""
    whole = 3 * 4 * size.parameters * (2 if cfg.algorithm.critic else 1)
    return whole + (published(cfg, size) if cfg.algorithm.reference_reset_every else 0)


def disk(cfg: Any, size: ModelSize) -> int:
    """Bytes of the run's folder at its fullest: the checkpoints kept, the one being written beside them, the model."""
    every, keep = (
        cfg.checkpoint.every,
        cfg.checkpoint.keep and cfg.checkpoint.keep + cfg.checkpoint.keep_best,
    )
    written = 1 + (cfg.steps // every if every else 0)
    return checkpoint(cfg, size) * (min(keep, written) if keep else written) + (
        checkpoint(cfg, size) + published(cfg, size)
    )


def show(parts: Mapping[str, int]) -> str:
    """ "3.2 GiB (object store 0.5, generator cache 1.0, ...)", the largest parts first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {amount(value)}" for name, value in ordered if value >= MIB)
    return f"{amount(sum(parts.values()))} ({listed})"


def amount(size: float) -> str:
    """3.2 GiB, or whole MiB below one GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
