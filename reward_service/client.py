"""The rewards as a run uses them: the rule service and the pool of reward models, joined to one
reward."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import pyarrow as pa
from ray.exceptions import RayActorError

from actors.records import check_scored
from actors.rollouts import Group
from cluster import placement
from cluster.environment import process_env
from cluster.stopping import SEMAPHORES
from cluster.supervision.pool import Pool
from cluster.supervision.remote import DeadlineExceeded, get
from cluster.supervision.supervisor import Supervised, ping, pingable
from reward_service.combine import join, rule_weights
from reward_service.models.meaning import supervisor
from reward_service.models.pool import RewardModelPool
from reward_service.service import RewardService

HINT = "the reward service's log in the session's logs folder of Ray"
START_S, CLOSE_S = 120.0, 5.0  # how long the service may take to start, and to close


class RewardClient:
    """Scores groups with the rules (one RewardService actor) and, where there are any, with the
    reward models.

    A group is scored from the moment it is submitted. A service that dies or hangs is replaced, and
    its successor gets the groups that had no answer yet."""

    def __init__(self, cfg: Any, tokenizer_path: str) -> None:
        self.cfg, self.tokenizer_path = cfg, tokenizer_path
        service = Supervised(
            "rewards",
            self._create,
            cfg.cluster,
            "cluster.restarts",
            cfg.cluster.restarts,
            START_S,
            HINT,
            ping,
        )
        self.rules = Pool([service])
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
        env = {**process_env(), "OMP_NUM_THREADS": "1", "VOLLEY_SEMAPHORES": SEMAPHORES}
        return [
            pingable(RewardService)
            .options(
                name=f"rewards{suffix}",
                runtime_env={"env_vars": env},
                **placement.options(self.cfg, "rewards", 0),
            )
            .remote(reward, self.tokenizer_path, self.cfg.reward.workers)
        ]

    @property
    def restarts(self) -> int:
        """How often the rule service was started again."""
        return self.rules.restarts

    def start(self) -> None:
        """Wait until the rule service and the reward models are up."""
        self.rules.start()
        if self.models:
            self.models.start()

    def submit(self, group: Group) -> None:
        """Start to score a finished group."""
        if self.models:
            self.models.submit(group)
        prompt = dataclasses.asdict(group.prompt)
        self.rules.give(
            group.meta.group_id,
            0,
            lambda service: service.score.remote(group.table, [prompt]),
            group,
        )

    def collect(self, groups: list[Group]) -> list[pa.RecordBatch]:
        """Return the SCORED batches of submitted groups, in their order, once all of them exist."""
        waiting = self.rules.unanswered.values()
        samples = sum(len(work.subject.meta.lengths) for work in waiting)
        # The longest that the service can take, as it has a deadline for each item.
        limit_s = 60.0 + self.cfg.reward.timeout_s * (1 + samples / self.cfg.reward.workers)
        scored = [
            self.rules.collect(i, limit_s, f"rewards: group {i}")
            for i in (group.meta.group_id for group in groups)
        ]
        if self.models:
            verdicts = [self.models.collect(group.meta.group_id) for group in groups]
            scored = [
                join(by_rules, by_models, self.weights, self.cfg.reward.combine, self.supervisor)
                for by_rules, by_models in zip(scored, verdicts, strict=True)
            ]
        return [check_scored(batch) for batch in scored]

    def forget(self) -> None:
        """Drop all submitted groups: nobody will collect their rewards."""
        self.rules.forget()
        if self.models:
            self.models.forget()

    def stop(self) -> None:
        """End the rule service and the reward models."""
        # The service is asked to end its worker processes itself. A service that is dead or does
        # not answer is ended by force in the next line, so neither error needs to be reported.
        with suppress(RayActorError, DeadlineExceeded):
            get(self.rules.members[0].actor.close.remote(), CLOSE_S, "rewards: close")
        self.rules.stop()
        if self.models:
            self.models.stop()
