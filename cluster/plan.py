"""Estimates of what a run needs: memory of one machine, disk for checkpoints, room in the object
store. Pure; all sizes are in bytes.

The estimates tell a run that cannot fit from one that can, and say which part is the largest. What
lives on a GPU (learner.gpus, generator.gpus, reference.gpus or reward_model.gpus above 0) is not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.roster import count, has_reference, refreshes_reward_model
from conf.schema import Config

MIB, GIB = 1 << 20, 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}  # of one value
# Private memory of a process besides its model, cache and activations, measured on Linux with the
# CPU builds. "services" are Ray's own processes, the reward service and the writer of rollouts;
# "reward" is one scoring process.
PROCESS = {
    "learner": 600 * MIB,
    "generator": 1450 * MIB,
    "reference": 350 * MIB,
    "reward": 100 * MIB,
    "reward_model": 350 * MIB,
    "services": 1200 * MIB,
}
# Values kept for the backward pass per token, layer and hidden unit, if attention matrices are not
# stored (arXiv 2205.05198, equation 2: 34 bytes at 2 bytes a value).
ACTIVATIONS = 17
FLOAT32 = 4  # bytes of one value


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model that its memory depends on.

    parameters: tied parameters count once.
    layers, hidden, vocabulary: 0 if the model's config does not say.
    frozen: further parameters that are never trained, such as the reference of an implicit reward
        model.
    """

    parameters: int
    layers: int = 0
    hidden: int = 0
    vocabulary: int = 0
    frozen: int = 0


def memory(
    cfg: Config, size: ModelSize, rewards: Mapping[str, ModelSize] | None = None
) -> dict[str, int]:
    """Return the bytes of each part that is resident all the time on the one machine of a local
    cluster.

    size: of the policy. rewards: sizes of the served reward models by name. vLLM on a CPU keeps
    weights twice: as loaded, and packed for its kernels.
    """
    policy_bytes, rewards = published(cfg, size), rewards or {}
    parts = {} if cfg.learner.gpus else training_memory(cfg, size, rewards)
    if has_reference(cfg) and not cfg.reference.gpus:
        parts["reference"] = policy_bytes * count(cfg, "reference")
    if rewards and not cfg.reward_model.gpus:
        parameters = sum(m.parameters + m.frozen for m in rewards.values())
        parts["reward models"] = parameters * BYTES[cfg.model.dtype] * count(cfg, "reward_model")
    if cfg.generates and not cfg.generator.gpus:
        generators = count(cfg, "generator")
        parts["generator weights"] = 2 * policy_bytes * generators
        # vLLM takes whole GiB (cluster/environment.py).
        parts["generator cache"] = max(1, round(cfg.generator.kv_cache_gib)) * GIB * generators
    parts["object store"] = cfg.cluster.object_store_mib * MIB
    parts["processes"] = process_memory(cfg)
    return parts


def training_memory(
    cfg: Config, size: ModelSize, rewards: Mapping[str, ModelSize]
) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state of everything that is trained.

    AdamW keeps two float32 moments, and a float32 master copy if the weights are bfloat16 or
    sharded. ZeRO 1 shards the optimizer state over the ranks, ZeRO 2 also the gradients, ZeRO 3
    also the weights. All ranks are on this machine, so each rank adds a copy of what is not
    sharded.
    """
    lr, rm, weight_bytes = cfg.learner, cfg.reward_model, BYTES[cfg.model.dtype]
    has_master = weight_bytes < FLOAT32 or lr.zero_stage > 0
    optimizer_bytes = (3 if has_master else 2) * FLOAT32

    def trained(parameters: int) -> list[int]:
        """Bytes of weights, gradients and optimizer state on all ranks together."""
        bytes_and_zero_stage = ((weight_bytes, 3), (weight_bytes, 2), (optimizer_bytes, 1))
        return [
            parameters * each * (1 if lr.zero_stage >= sharded_from else lr.ranks)
            for each, sharded_from in bytes_and_zero_stage
        ]

    has_critic = cfg.algorithm.critic and cfg.stage.trains == "policy"
    names = ("learner weights", "gradients", "optimizer state")
    parts = dict(zip(names, trained(size.parameters * (2 if has_critic else 1)), strict=True))
    if refreshes_reward_model(cfg) and (refreshed := rewards.get(rm.refresh)):
        frozen_bytes = refreshed.frozen * weight_bytes * lr.ranks
        parts["reward learner"] = sum(trained(refreshed.parameters)) + frozen_bytes
    if cfg.stage.trains == "reward_model" and rm.head == "implicit":
        parts["reward reference"] = size.parameters * weight_bytes * lr.ranks
    return parts


def process_memory(cfg: Config) -> int:
    """Return the bytes that the processes of a run need besides models, caches and activations.

    Learner ranks and ranks that train a reward model run at the same time only if RL refreshes its
    reward model. The stage that trains a reward model ends the former before it starts the latter.
    """
    learners = (count(cfg, "learner"), count(cfg, "reward_learner"))
    counts = {
        "learner": sum(learners) if refreshes_reward_model(cfg) else max(learners),
        "generator": count(cfg, "generator"),
        "services": 1,
        "reward": cfg.reward.workers * count(cfg, "rewards"),
        "reward_model": count(cfg, "reward_model"),
        "reference": count(cfg, "reference"),
    }
    return sum(PROCESS[kind] * number for kind, number in counts.items())


def passing(cfg: Config, size: ModelSize) -> dict[str, int]:
    """Return the bytes that come and go in a training step.

    They are the activations of a micro-batch, and three float32 matrices [tokens of a chunk,
    vocabulary]: the logits, their gradient and values in between.
    """
    lr = cfg.learner
    if lr.gpus:
        return {}
    if lr.gradient_checkpointing:  # the input of every layer, and all values of one layer
        values = size.layers + ACTIVATIONS
    else:
        values = size.layers * ACTIVATIONS
    tokens = lr.micro_batch_tokens
    activation_bytes = tokens * size.hidden * values * BYTES[cfg.model.dtype]
    logit_bytes = 3 * FLOAT32 * min(lr.logprob_chunk_tokens, tokens) * size.vocabulary
    return {"activations": activation_bytes * lr.ranks, "logits": logit_bytes * lr.ranks}


def published(cfg: Config, size: ModelSize) -> int:
    """Return the bytes that one version of the weights takes in the object store."""
    return size.parameters * BYTES[cfg.model.dtype]


def checkpoint(cfg: Config, size: ModelSize) -> int:
    """Return the bytes of one checkpoint.

    It holds the weights and both moments of policy and critic in float32, and the reference if the
    algorithm resets it.
    """
    models = 2 if cfg.algorithm.critic else 1
    reference = published(cfg, size) if cfg.algorithm.reference_reset_every else 0
    return 3 * FLOAT32 * size.parameters * models + reference


def disk(cfg: Config, size: ModelSize) -> int:
    """Return the bytes of the run's folder when it is largest.

    It then holds the checkpoints that stay, one that is being written, and the final model.
    """
    c = cfg.checkpoint
    written = 1 + (cfg.steps // c.every if c.every else 0)
    staying = min(c.keep + c.keep_best, written) if c.keep else written
    return checkpoint(cfg, size) * (staying + 1) + published(cfg, size)


def show(parts: Mapping[str, int]) -> str:
    """Return a total and its parts, the largest first: "3.2 GiB (generator cache 1.0 GiB, ...)".

    Parts below one MiB are left out.
    """
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {amount(value)}" for name, value in ordered if value >= MIB)
    return f"{amount(sum(parts.values()))} ({listed})"


def amount(size: float) -> str:
    """Return a number of bytes as text, such as "3.2 GiB", or "512 MiB" below one GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
