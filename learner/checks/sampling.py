"""Checks of how completions are sampled."""

from __future__ import annotations

from conf.schema import Config, ConfigError
from conf.settings import get


def check_sampling(cfg: Config) -> None:
    """Raise ConfigError for sampling that training cannot correct for, or an engine cannot do."""
    rollout, generator = cfg.rollout, cfg.generator
    if rollout.top_p < 1 or rollout.top_k > 0:
        key = "rollout.top_p" if rollout.top_p < 1 else "rollout.top_k"
        raise ConfigError(
            key,
            get(cfg, key),
            "samples from a truncated distribution have no finite importance ratio "
            "to the policy that is trained",
            "Set rollout.top_p=1 and rollout.top_k=0.",
        )
    if generator.weight_backend == "nccl" and generator.gpus == 0:
        raise ConfigError(
            "generator.weight_backend",
            "nccl",
            "needs GPUs (generator.gpus > 0)",
            "Use generator.weight_backend=object_store.",
        )
    if generator.block_size % 32 and generator.gpus == 0:
        raise ConfigError(
            "generator.block_size",
            generator.block_size,
            "on a CPU vLLM has blocks of a multiple of 32 tokens",
            "Use 32, or 0 for vLLM's own choice.",
        )
    if (
        rollout.max_staleness > 0
        and cfg.algorithm.tis_cap is None
        and cfg.learner.updates_per_batch == 1
    ):
        raise ConfigError(
            "rollout.max_staleness",
            rollout.max_staleness,
            "off-policy tokens need a correction",
            "Set algorithm.tis_cap=2 (truncated importance weights).",
        )
