"""Checks of the arithmetic of batches."""

from __future__ import annotations

from conf.schema import Config, ConfigError


def check_batches(cfg: Config) -> None:
    """Raise ConfigError where batches do not divide, or a sample is longer than a forward pass."""
    rollout, learner = cfg.rollout, cfg.learner
    prompts, updates = rollout.prompts_per_step, learner.updates_per_batch
    if prompts % updates:
        divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
        raise ConfigError(
            "learner.updates_per_batch",
            updates,
            f"must divide rollout.prompts_per_step={prompts}, so that every optimizer step trains "
            "on whole groups",
            f"Use one of {divisors}.",
        )
    samples = cfg.samples_per_step // updates  # in an optimizer step
    if samples % learner.ranks:
        raise ConfigError(
            "learner.ranks",
            learner.ranks,
            f"must divide the {samples} samples of an optimizer step (rollout.prompts_per_step="
            f"{prompts} x rollout.group_size={rollout.group_size} / "
            f"learner.updates_per_batch={updates})",
        )
    longest = cfg.data.max_prompt_tokens + rollout.max_tokens
    if cfg.generates and learner.micro_batch_tokens < longest:
        raise ConfigError(
            "learner.micro_batch_tokens",
            learner.micro_batch_tokens,
            f"one sample may have {longest} tokens (data.max_prompt_tokens + rollout.max_tokens)",
            f"Set it to {longest} or more.",
        )
