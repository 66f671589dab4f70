"""Checks of the algorithm against the settings that it depends on.

Whether the parts of an algorithm fit each other is checked in learner/algorithms/parts.py.
"""

from __future__ import annotations

from conf.schema import Config, ConfigError
from learner.algorithms import advantages
from reward_service.models.meaning import supervisor
from reward_service.step_labels.steps import STEP_RULES


def check_advantage(cfg: Config) -> None:
    """Raise ConfigError for an advantage that no function has been registered for."""
    names = advantages.names()
    if cfg.algorithm.advantage not in names:
        raise ConfigError(
            "algorithm.advantage", cfg.algorithm.advantage, f"expected one of {', '.join(names)}"
        )


def check_algorithm(cfg: Config) -> None:
    """Raise ConfigError where the parts of the algorithm need other settings than they have."""
    algorithm = cfg.algorithm
    if algorithm.group_baseline and cfg.rollout.group_size < 2:
        raise ConfigError(
            "rollout.group_size",
            cfg.rollout.group_size,
            f"algorithm={algorithm.name} uses the group's mean as its baseline and needs at least "
            "2",
            "Raise rollout.group_size or choose an algorithm without a group baseline.",
        )
    if algorithm.advantage == "process":
        _check_step_rewards(cfg)
    if (algorithm.advantage == "gae") != algorithm.critic:
        raise ConfigError(
            "algorithm.critic",
            algorithm.critic,
            f"algorithm.advantage={algorithm.advantage} "
            f"{'needs' if algorithm.advantage == 'gae' else 'has no use for'} a critic",
        )
    _check_kl(cfg)
    if algorithm.normaliser == "constant" and not (
        algorithm.loss_constant and algorithm.loss_constant > 0
    ):
        raise ConfigError(
            "algorithm.loss_constant",
            algorithm.loss_constant,
            "algorithm.normaliser=constant needs a positive divisor in tokens",
            "Usually rollout.max_tokens.",
        )
    if algorithm.loss == "ppo_clip" and algorithm.eps_low >= 1:
        raise ConfigError(
            "algorithm.eps_low",
            algorithm.eps_low,
            "expected less than 1 (the ratio is clipped to 1 - eps_low)",
        )


def _check_kl(cfg: Config) -> None:
    """Raise ConfigError for a KL term without effect, and for uses of a missing reference."""
    algorithm = cfg.algorithm
    if algorithm.beta > 0 and algorithm.kl_placement == "none":
        raise ConfigError(
            "algorithm.beta",
            algorithm.beta,
            "a KL coefficient above 0 has no effect with algorithm.kl_placement=none",
            "Set algorithm.beta=0, or place the KL in loss or reward.",
        )
    has_reference = algorithm.beta > 0 and algorithm.kl_placement != "none"
    for key in ("reference_reset_every", "exact_kl_tokens"):
        if getattr(algorithm, key) and not has_reference:
            raise ConfigError(
                f"algorithm.{key}",
                getattr(algorithm, key),
                "there is no reference with algorithm.beta=0 or algorithm.kl_placement=none",
                "Set algorithm.beta above 0, or leave this at 0.",
            )


def _check_step_rewards(cfg: Config) -> None:
    """Raise ConfigError where neither a process model nor a rule can reward single steps."""
    if not supervisor(cfg) and cfg.data.steps not in STEP_RULES:
        raise ConfigError(
            "data.steps",
            cfg.data.steps,
            f"algorithm={cfg.algorithm.name} needs step rewards: a process "
            f"model among reward.models, or one of the rules {', '.join(STEP_RULES)}",
            "Use reward=prm, data=arithmetic, or algorithm=grpo.",
        )
    if supervisor(cfg) and cfg.reward.combine != "sum":
        raise ConfigError(
            "reward.combine", cfg.reward.combine, "the rewards of single steps add up", "Use sum."
        )
