"""Groups on their way to training, with the object references of what was generated."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from actors.data.prompt import Prompt
from actors.given import COLUMNS, GivenRequest, given_groups
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
        self.dispatcher = Dispatcher(generators, cfg.seed, cfg.rollout.timeout_s, self.refuse)
        self.finished: list[Group] = []  # oldest first
        self.given_scores: dict[int, pa.RecordBatch] = {}  # of groups whose answers were given
        self.refused: list[tuple[int, str]] = []  # (group id, reason): no generator takes them

    def refuse(self, group_id: int, reason: str) -> None:
        """Note that no generator takes this group. The loop leaves it out (groups.Refusals)."""
        self.refused.append((group_id, reason))

    def submit(self, groups: Sequence[tuple[int, Prompt]], version: int) -> list[int]:
        """Start generating the completions of admitted groups, given as (group id, prompt).

        Where the data holds the completions, the groups are finished when this returns. Returns the
        ids of finished groups.
        """
        if self.cfg.algorithm.data in COLUMNS:
            return self._take_given(groups)
        size, sampling = self.cfg.rollout.group_size, training_sampling(self.cfg)
        for group_id, prompt in groups:
            ids = self.policy.encode(prompt.text)
            self.dispatcher.submit(group_id, prompt, ids, size, sampling, version)
        return []

    def _take_given(self, groups: Sequence[tuple[int, Prompt]]) -> list[int]:
        requests = [GivenRequest(i, p, self.policy.encode(p.text)) for i, p in groups]
        cfg, limit = self.cfg, self.cfg.rollout.max_tokens
        for group, scores in given_groups(
            requests, self.policy.tokenizer, cfg.algorithm.data, cfg.seed, limit
        ):
            self.given_scores[group.meta.group_id] = scores
            self.finished.append(group)
        return [group_id for group_id, _ in groups]

    def wait(self) -> list[int]:
        """Wait until at least one group is generated; send it to its rewards.

        Returns the new ids.
        """
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
