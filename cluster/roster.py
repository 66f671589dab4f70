"""The roles of a run: the one list of its actors. Pure.

Placement (cluster/placement.py), the memory plan (cluster/plan.py), the checks before a run and the
metrics of restarts follow from this list. Nothing else works out which actors a run has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conf.schema import Config

# Every role that a run may have, and the words for it in the description of its metrics.
ROLES = {
    "generator": "generators",
    "learner": "the learner, all its ranks,",
    "reference": "references",
    "rewards": "the reward service",
    "rollout_writer": "the writer of rollouts",
    "reward_model": "reward models",
    "reward_learner": "the ranks that train a reward model",
}
# The roles whose actors reserve CPUs, GPUs or other resources of Ray.
PLACED = tuple(name for name in ROLES if name != "rollout_writer")
REWARDS_CPUS = 0.5  # of the reward service's actor; its scoring processes reserve nothing


@dataclass(frozen=True)
class Role:
    """`count` actors of one kind, each with `cpus` and `gpus`, which are Ray's logical ones."""

    name: str
    count: int
    cpus: float = 0.0
    gpus: float = 0.0


def roster(cfg: Config) -> tuple[Role, ...]:
    """Return the roles of a run that have at least one actor, in the order of their placement.

    A run that samples the policy has learner ranks even if it does not train the policy, because
    the generators receive its weights from them.
    """
    ranks, samples = cfg.learner.ranks, cfg.generates
    has_learner = samples or cfg.stage.trains == "policy"
    has_reward_models = samples and bool(cfg.reward.models)
    logs_rollouts = cfg.stage.evaluates and cfg.logging.rollouts != 0
    roles = (
        _role("learner", ranks if has_learner else 0, cfg.learner),
        _role("reward_learner", ranks if trains_reward_model(cfg) else 0, cfg.learner),
        _role("reward_model", cfg.reward_model.count if has_reward_models else 0, cfg.reward_model),
        _role("generator", cfg.generator.count if samples else 0, cfg.generator),
        _role("reference", cfg.reference.count if has_reference(cfg) else 0, cfg.reference),
        Role("rewards", 1 if samples else 0, REWARDS_CPUS),
        Role("rollout_writer", 1 if logs_rollouts else 0),
    )
    return tuple(role for role in roles if role.count)


def count(cfg: Config, name: str) -> int:
    """Return the number of actors that a role has in a run."""
    return next((role.count for role in roster(cfg) if role.name == name), 0)


def has_reference(cfg: Config) -> bool:
    """Return whether a KL term compares the trained policy with a frozen reference."""
    trains_on_answers = cfg.stage.trains == "policy" and cfg.stage.answers != "corpus"
    has_kl_term = cfg.algorithm.beta > 0 and cfg.algorithm.kl_placement != "none"
    return trains_on_answers and has_kl_term


def refreshes_reward_model(cfg: Config) -> bool:
    """Return whether RL trains one of its reward models again as the policy changes."""
    rm = cfg.reward_model
    return bool(rm.refresh) and (rm.every > 0 or rm.initial)


def trains_reward_model(cfg: Config) -> bool:
    """Return whether a run has ranks that train a reward model."""
    return cfg.stage.trains == "reward_model" or refreshes_reward_model(cfg)


def _role(name: str, number: int, settings: Any) -> Role:
    """`settings`: the group of settings that holds the role's `cpus` and `gpus`."""
    return Role(name, number, settings.cpus, settings.gpus)
