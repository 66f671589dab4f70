"""The actors of a run by role: the one list that placement, the memory plan and metrics follow. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conf.schema import Config

# Every role that a run may have, and what it is called in the description of its metrics.
ROLES = {
    "generator": "generators",
    "learner": "the learner, all its ranks,",
    "reference": "references",
    "rewards": "the reward service",
    "rollout_writer": "the writer of rollouts",
    "reward_model": "reward models",
    "reward_learner": "the ranks that train a reward model",
}
UNPLACED = ("rollout_writer",)  # reserves nothing
REWARDS_CPUS = 0.5  # of the actor in front of the scoring processes, which have CPUs of their own


@dataclass(frozen=True)
class Role:
    """`count` actors of one kind; `cpus` and `gpus` are Ray's logical ones, for one actor."""

    name: str
    count: int
    cpus: float = 0.0
    gpus: float = 0.0


def roster(cfg: Config) -> tuple[Role, ...]:
    """The roles of a run that have at least one actor."""
    samples, lr, rm = cfg.generates, cfg.learner, cfg.reward_model
    holds_policy = samples or cfg.stage.trains == "policy"
    roles = (
        Role("learner", lr.ranks * holds_policy, lr.cpus, lr.gpus),
        Role("reward_learner", lr.ranks * trains_reward_model(cfg), lr.cpus, lr.gpus),
        Role("reward_model", rm.count * bool(samples and cfg.reward.models), rm.cpus, rm.gpus),
        Role("generator", cfg.generator.count * samples, cfg.generator.cpus, cfg.generator.gpus),
        Role(
            "reference",
            cfg.reference.count * has_reference(cfg),
            cfg.reference.cpus,
            cfg.reference.gpus,
        ),
        Role("rewards", int(samples), REWARDS_CPUS),
        Role("rollout_writer", int(cfg.stage.evaluates and cfg.logging.rollouts != 0)),
    )
    return tuple(role for role in roles if role.count)


def count(cfg: Config, name: str) -> int:
    """How many actors of a role the run has."""
    return next((role.count for role in roster(cfg) if role.name == name), 0)


def has_reference(cfg: Config) -> bool:
    """Whether a KL term compares the trained policy with a frozen reference."""
    a, stage = cfg.algorithm, cfg.stage
    trains = stage.trains == "policy" and stage.answers != "corpus"
    return trains and a.beta > 0 and a.kl_placement != "none"


def refreshes_reward_model(cfg: Config) -> bool:
    """Whether reinforcement learning trains one of its reward models again on the way."""
    rm = cfg.reward_model
    return bool(rm.refresh and (rm.every or rm.initial))


def trains_reward_model(cfg: Config) -> bool:
    """Whether there are ranks that train a reward model."""
    return cfg.stage.trains == "reward_model" or refreshes_reward_model(cfg)
