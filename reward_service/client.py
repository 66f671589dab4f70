"""The rewards as a run calls them: the rule service and the pool of reward models as one reward."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
from ray.exceptions import RayActorError

from actors.records import check_scored
from actors.rollouts import Group
from cluster import placement
from cluster.environment import process_env
from cluster.stopping import SEMAPHORES
from cluster.supervision.remote import DeadlineExceeded, get
from cluster.supervision.supervisor import Supervised, ping, pingable
from reward_service.combine import join, rule_weights
from reward_service.models.meaning import supervisor
from reward_service.models.pool import RewardModelPool
from reward_service.service import RewardService

HINT = "the reward service's log in the session's logs folder of Ray"


class RewardClient:
    """One RewardService actor for the rules, and the pool of reward models where there are any, as one reward. A group
    is scored as soon as it is generated. A service that dies or hangs is replaced, and what it had not answered is
    given to its successor."""

    def __init__(self, cfg: Any, tokenizer_path: str) -> None:
        self.cfg, self.tokenizer_path = cfg, tokenizer_path
        self.pending: dict[int, tuple[Group, Any]] = {}
        self.member = Supervised(
            "rewards",
            self._create,
            cfg.cluster,
            "cluster.restarts",
            cfg.cluster.restarts,
            120.0,
            HINT,
            ping,
        )
        reward = cfg.reward
        self.models = RewardModelPool(cfg, tokenizer_path) if reward.models else None
        self.weights = {name: w for name, w in reward.rules.items() if name in reward.models}
        self.supervisor = supervisor(cfg)

    def _create(self, suffix: str) -> list[Any]:
        reward = dataclasses.asdict(self.cfg.reward)
        reward["rules"] = rule_weights(reward["rules"], reward.pop("models"))
        process = self.cfg.algorithm.advantage == "process" and not supervisor(self.cfg)
        reward["steps"] = self.cfg.data.steps if process else ""
        reward["options"] = {"max_tokens": self.cfg.rollout.max_tokens, **reward["options"]}
        return [
            pingable(RewardService)
            .options(
                name=f"rewards{suffix}",
                runtime_env={
                    "env_vars": {
                        **process_env(),
                        "OMP_NUM_THREADS": "1",
                        "VOLLEY_SEMAPHORES": SEMAPHORES,
                    }
                },
                **placement.options(self.cfg, "rewards", 0),
            )
            .remote(reward, self.tokenizer_path, self.cfg.reward.workers)
        ]

    @property
    def restarts(self) -> int:
        return self.member.health.restarts

    def start(self) -> None:
        self.member.start()
        if self.models:
            self.models.start()

    def submit(self, group: Group) -> None:
        if self.models:
            self.models.submit(group)
        self._submit(group)

    def _submit(self, group: Group) -> None:
        prompt = dataclasses.asdict(group.prompt)
        self.pending[group.meta.group_id] = (
            group,
            self.member.actor.score.remote(group.table, [prompt]),
        )

    def collect(self, groups: list[Group]) -> list[pa.RecordBatch]:
        """SCORED batches of submitted groups, in their order."""
        samples = sum(len(g.meta.lengths) for g, _ in self.pending.values())
        # The worst that the service's own per-item deadlines allow.
        limit = 60.0 + self.cfg.reward.timeout_s * (1 + samples / self.cfg.reward.workers)
        scored = [self._scored(g.meta.group_id, limit) for g in groups]
        if self.models:
            scored = [
                join(
                    rules,
                    self.models.collect(g.meta.group_id),
                    self.weights,
                    self.cfg.reward.combine,
                    self.supervisor,
                )
                for g, rules in zip(groups, scored, strict=True)
            ]
        return [check_scored(batch) for batch in scored]

    def _scored(self, group_id: int, limit_s: float) -> pa.RecordBatch:
        while True:
            try:
                found = self.member.wait(
                    self.pending[group_id][1], limit_s, f"rewards: group {group_id}"
                )
            except Exception as error:  # noqa: BLE001 - classified
                self.member.replace(error, self._submit_again)
                continue
            del self.pending[group_id]
            return found

    def forget(self) -> None:
        """Nobody asks for what was submitted any more."""
        self.pending.clear()
        if self.models:
            self.models.forget()

    def _submit_again(self) -> None:
        for group, _ in list(self.pending.values()):
            self._submit(group)

    def stop(self) -> None:
        try:
            get(self.member.actor.close.remote(), 5.0, "rewards: close")
        except (RayActorError, DeadlineExceeded):
            pass  # it is going away either way
        self.member.end()
        if self.models:
            self.models.stop()
