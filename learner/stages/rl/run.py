"""The handles of the stage that trains the policy."""

from __future__ import annotations

from dataclasses import dataclass

from actors.data.prompt import Prompt
from actors.data.sampler import Sampler
from actors.reference import ReferencePool
from actors.rollout_log import RolloutLog
from actors.rollouts import GeneratorPool
from learner.stage import Run
from learner.stages.engines import PolicyFiles
from learner.stages.rl.group_queue import GroupQueue
from reward_service.client import RewardClient


@dataclass(frozen=True)
class TrainingData:
    """Training prompts in the order they are drawn, and the held-out prompts."""

    sampler: Sampler
    heldout: list[Prompt]


@dataclass(frozen=True)
class RLRun(Run):
    """The handles of this stage, on top of those of every stage."""

    policy: PolicyFiles
    data: TrainingData
    generators: GeneratorPool
    rewards: RewardClient
    reference: ReferencePool | None  # None where no KL term needs it
    rollout_log: RolloutLog
    groups: GroupQueue
