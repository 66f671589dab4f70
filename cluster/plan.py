"""What a run needs, on paper: memory of one machine, disk for checkpoints, room in the object store. Pure; in bytes.

Estimates, made to tell a run that cannot fit from one that can, and to say which part is the large one. What lives on a
GPU (learner.gpus, generator.gpus, reference.gpus, reward_model.gpus above 0) is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.roster import count, has_reference

if TYPE_CHECKING:
    from conf.schema import Config

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


def memory(
    cfg: Config, size: ModelSize, rewards: Mapping[str, ModelSize] | None = None
) -> dict[str, int]:
    """Bytes of each part that must be resident at once on the one machine of a local cluster.

    `rewards`: sizes of reward.models by name, as far as they are served. What lives on a GPU is not
    counted. vLLM on a CPU keeps weights twice: as loaded, and packed for its kernels.
    """
    parameters, weight_bytes = size.parameters, BYTES[cfg.model.dtype]
    g, rm, rewards = cfg.generator, cfg.reward_model, rewards or {}
    parts = {} if cfg.learner.gpus else training_memory(cfg, size, rewards)
    if has_reference(cfg) and not cfg.reference.gpus:
        parts["reference"] = parameters * weight_bytes * cfg.reference.count
    if rewards and not rm.gpus:
        each = sum(m.parameters + m.frozen for m in rewards.values())
        parts["reward models"] = each * weight_bytes * rm.count
    if generators := count(cfg, "generator") * (not g.gpus):
        parts["generator weights"] = 2 * parameters * weight_bytes * generators
        # vLLM takes whole GiB (cluster/environment.py).
        parts["generator cache"] = max(1, round(g.kv_cache_gib)) * GIB * generators
    parts["object store"] = cfg.cluster.object_store_mib * MIB
    parts["processes"] = process_memory(cfg, rewards)
    return parts


def training_memory(
    cfg: Config, size: ModelSize, rewards: Mapping[str, ModelSize]
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state of everything that is trained.

    AdamW keeps two float32 moments, and a float32 master copy where weights are held in less or are
    sharded. ZeRO 1 shards the optimizer's part over the ranks, 2 gradients too, 3 weights too. The
    ranks share the machine, so what is not sharded is there once a rank.
    """
    lr, rm, weight_bytes = cfg.learner, cfg.reward_model, BYTES[cfg.model.dtype]
    moments = 8 + (4 if weight_bytes < 4 or lr.zero_stage else 0)

    def trained(parameters: int) -> list[int]:
        shares = ((weight_bytes, 3), (weight_bytes, 2), (moments, 1))
        return [
            parameters * each * (1 if lr.zero_stage >= sharded_from else lr.ranks)
            for each, sharded_from in shares
        ]

    with_critic = cfg.algorithm.critic and cfg.stage.trains == "policy"
    names = ("learner weights", "gradients", "optimizer state")
    parts = dict(zip(names, trained((1 + with_critic) * size.parameters), strict=True))
    if refreshed := refreshed_model(cfg, rewards):
        frozen = refreshed.frozen * weight_bytes * lr.ranks
        parts["reward learner"] = sum(trained(refreshed.parameters)) + frozen
    if cfg.stage.trains == "reward_model" and rm.head == "implicit":
        parts["reward reference"] = size.parameters * weight_bytes * lr.ranks
    return parts


def refreshed_model(cfg: Config, rewards: Mapping[str, ModelSize]) -> ModelSize | None:
    """The size of the reward model that is trained beside the policy, if any."""
    rm = cfg.reward_model
    return rewards.get(rm.refresh) if rm.every or rm.initial else None


def process_memory(cfg: Config, rewards: Mapping[str, ModelSize]) -> int:
    """Bytes of the processes of a run beside models, caches and activations."""
    counts = {
        "learner": cfg.learner.ranks * (2 if refreshed_model(cfg, rewards) else 1),
        "generator": count(cfg, "generator"),
        "services": 1,
        "reward": cfg.reward.workers * count(cfg, "rewards"),
        "reward_model": cfg.reward_model.count * bool(rewards),
        "reference": count(cfg, "reference"),
    }
    return sum(PROCESS[kind] * number for kind, number in counts.items())


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
