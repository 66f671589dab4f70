"""Groups on their way to training, with the object references of what was generated."""

from __future__ import annotations

import pyarrow as pa

from actors.data.prompt import Prompt
from actors.given import COLUMNS, given_group
from actors.rollouts import Dispatcher, GeneratorPool, Group
from conf.schema import Config
from learner.stages.engines import PolicyFiles, training_sampling
from learner.stages.rl.batch import ScoredGroup
from reward_service.client import RewardClient


class GroupQueue:
    """Groups on their way to training: being generated, or finished and not yet trained on.

    Answers come from generators, or from the data where it holds them (SFT, DPO).
    """

    def __init__(
        self, cfg: Config, policy: PolicyFiles, generators: GeneratorPool, rewards: RewardClient
    ) -> None:
        self.cfg, self.policy, self.rewards = cfg, policy, rewards
        self.dispatcher = Dispatcher(generators, cfg.seed, cfg.rollout.timeout_s, self._refuse)
        self.finished: list[Group] = []  # oldest first
        self.given_scores: dict[int, pa.RecordBatch] = {}  # of groups whose answers were given
        self.refused: list[tuple[int, str]] = []  # (group id, reason): no generator takes them

    def _refuse(self, group_id: int, reason: str) -> None:
        self.refused.append((group_id, reason))

    def submit(self, group_id: int, prompt: Prompt, version: int) -> bool:
        """Start generating the completions of an admitted group.

        Returns True where the data holds the completions, so that the group is finished at once.
        """
        cfg, ids = self.cfg, self.policy.encode(prompt.text)
        if cfg.algorithm.data not in COLUMNS:
            size = cfg.rollout.group_size
            self.dispatcher.submit(group_id, prompt, ids, size, training_sampling(cfg), version)
            return False
        group, self.given_scores[group_id] = given_group(
            group_id,
            prompt,
            ids,
            self.policy.tokenizer,
            cfg.algorithm.data,
            cfg.seed,
            cfg.rollout.max_tokens,
        )
        self.finished.append(group)
        return True

    def wait(self) -> list[int]:
        """Wait until at least one group is generated; send it to its rewards. Returns the new ids."""
        new = []
        for group in self.dispatcher.finished():
            self.rewards.submit(group)
            self.finished.append(group)
            new.append(group.meta.group_id)
        return new

    def take(self, group_ids: list[int]) -> list[Group]:
        """Remove these finished groups from the queue, in the order of their ids."""
        chosen = [g for g in self.finished if g.meta.group_id in group_ids]
        self.finished = [g for g in self.finished if g.meta.group_id not in group_ids]
        return sorted(chosen, key=lambda g: g.meta.group_id)

    def score(self, groups: list[Group]) -> list[ScoredGroup]:
        """The groups with their rewards, once all of them have some."""
        if self.given_scores:
            scored = [self.given_scores.pop(g.meta.group_id) for g in groups]
        else:
            scored = self.rewards.collect(groups)
        return [ScoredGroup(g, s) for g, s in zip(groups, scored, strict=True)]

    def clear(self) -> None:
        """Forget every group: the run goes back to a checkpoint."""
        self.dispatcher.clear()
        self.finished, self.given_scores, self.refused = [], {}, []
