"""Sampling a policy in a stage that does not train it: annotation, and reward models."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from actors.data.prompt import Prompt
from actors.data.stream import Dataset
from actors.records import SamplingParams
from actors.rollouts import Dispatcher, GeneratorPool, Group
from conf.schema import Config
from learner.algorithms.assemble import read_scores
from learner.engine.group import LearnerGroup
from learner.stages import engines
from learner.stages.engines import PolicyFiles, Request
from reward_service.client import RewardClient


@dataclass(frozen=True)
class SamplingEngines:
    """The actors that sample the policy of `cfg.model` as it is.

    The learner holds the weights that a generator which is replaced has to load.
    """

    cfg: Config
    policy: PolicyFiles
    train: Dataset
    heldout: list[Prompt]
    learner: LearnerGroup
    generators: GeneratorPool
    rewards: RewardClient

    @classmethod
    def create(
        cls, cfg: Config, policy: PolicyFiles, train: Dataset, heldout: list[Prompt]
    ) -> SamplingEngines:
        """Create the actors, and do not wait for them. The arguments are those of open_policy."""
        engines.check_rewards(cfg, heldout)
        learner = engines.create_learner(cfg)
        generators = engines.create_generators(cfg, policy)
        rewards = RewardClient(cfg, policy.path)
        return cls(cfg, policy, train, heldout, learner, generators, rewards)

    def start(self) -> None:
        """Wait until the generators have proved the weights."""
        self.learner.start()
        self.generators.start()
        self.rewards.start()
        self.publish()

    def publish(self) -> None:
        """Bring the learner's weights to the generators."""
        probe = engines.probe_of(self.policy, self.heldout)
        self.generators.sync(self.learner.publish(0, probe))

    def rewind(self) -> None:
        """After the learner was replaced: forget what was under way, and publish again."""
        self.generators.abandon()
        self.rewards.forget()
        self.publish()

    def request(self, prompt: Prompt, n: int, temperature: float) -> Request:
        """`n` completions of a prompt."""
        sampling = SamplingParams(self.cfg.rollout.max_tokens, temperature)
        return Request(prompt, self.policy.encode(prompt.text), n, sampling)

    def sample(
        self, requests: list[Request], first_id: int
    ) -> tuple[list[Group], list[pa.RecordBatch]]:
        """Groups and their SCORED batches, in the order of `requests`.

        Group ids count down from `first_id`; the completions depend on them. Raises RunError where
        too many rewards are not ok.
        """
        cfg = self.cfg
        dispatcher = Dispatcher(self.generators, cfg.seed, cfg.rollout.timeout_s)
        groups, scored = engines.sample(
            dispatcher, self.rewards, requests, first_id, 0, engines.in_flight(cfg)
        )
        engines.check_failures(cfg, read_scores(scored))
        return groups, scored

    def stop(self) -> None:
        """End every actor."""
        self.rewards.stop()
        for member in self.generators.members:
            member.end()
        self.learner.stop()
