"""The small services beside the engines, as the trainer calls them: rewards, and the log of rollouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.exceptions import RayActorError

from actors.records import check_scored
from actors.rollouts import Group
from cluster.environment import process_env
from cluster.remote import DeadlineExceeded, get, kill
from reward_service.service import RewardService

HINT = "the reward service's log in the session's logs folder of Ray"


class RewardClient:
    """One RewardService actor. A group is scored as soon as it is generated; a dead service is replaced once a call."""

    def __init__(self, cfg: Any, tokenizer_path: str) -> None:
        self.cfg, self.tokenizer_path = cfg, tokenizer_path
        self.pending: dict[int, tuple[Group, Any]] = {}
        self.actor = self._create()

    def _create(self) -> Any:
        reward = dataclasses.asdict(self.cfg.reward)
        reward["steps"] = self.cfg.data.steps if self.cfg.algorithm.advantage == "process" else ""
        reward["options"] = {"max_tokens": self.cfg.rollout.max_tokens, **reward["options"]}
        return ray.remote(RewardService).options(
            name="rewards", num_cpus=0.5, runtime_env={"env_vars": {**process_env(), "OMP_NUM_THREADS": "1"}}
        ).remote(reward, self.tokenizer_path, self.cfg.reward.workers)

    def start(self) -> None:
        get(self.actor.stats.remote(), 120.0, "rewards: start", HINT)

    def submit(self, group: Group) -> None:
        prompt = dataclasses.asdict(group.prompt)
        self.pending[group.meta.group_id] = (group, self.actor.score.remote(group.table, [prompt]))

    def collect(self, groups: list[Group]) -> list[pa.RecordBatch]:
        """SCORED batches of submitted groups, in their order. Raises DeadlineExceeded."""
        samples = sum(len(g.meta.lengths) for g in groups)
        # The worst that the service's own per-item deadlines allow, and its start.
        limit = 120.0 + self.cfg.reward.timeout_s * (1 + samples / self.cfg.reward.workers)
        out = []
        for group in groups:
            try:
                found = get(self.pending[group.meta.group_id][1], limit, f"rewards: group {group.meta.group_id}", HINT)
            except (RayActorError, DeadlineExceeded):
                self._replace()
                found = get(self.pending[group.meta.group_id][1], limit, f"rewards: group {group.meta.group_id}", HINT)
            del self.pending[group.meta.group_id]
            out.append(check_scored(found))
        return out

    def _replace(self) -> None:
        kill(self.actor)
        self.actor = self._create()
        for group, _ in list(self.pending.values()):
            self.submit(group)

    def stop(self) -> None:
        try:
            get(self.actor.close.remote(), 5.0, "rewards: close")
        except (RayActorError, DeadlineExceeded):
            pass  # it is going away either way
        kill(self.actor)


class RolloutWriter:
    """Ray actor: decodes completions and writes rollouts/step_N.parquet, so that no token passes the controller."""

    def __init__(self, directory: str, tokenizer_path: str) -> None:
        from transformers import AutoTokenizer

        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)

    def __repr__(self) -> str:
        return "rollout-writer"

    def write(self, step: int, texts: list[str], tables: list[Any], scored: list[Any], advantages: list[list[float]],
              limit: int) -> int:
        """One file of at most `limit` rows (-1: all): text, reward, status, version ... Returns the rows written."""
        rows: list[dict[str, Any]] = []
        for text, table, score, advantage in zip(texts, ray.get(tables, timeout=60), ray.get(scored, timeout=60),
                                                 advantages, strict=True):
            completions = self.tokenizer.batch_decode(table.column("completion_ids").to_pylist(),
                                                      skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for i, (roll, point) in enumerate(zip(table.to_pylist(), score.to_pylist(), strict=True)):
                rows.append({
                    "step": step, "group_id": roll["group_id"], "prompt_id": roll["prompt_id"],
                    "sample_index": roll["sample_index"], "prompt": text, "completion": completions[i],
                    "length": len(roll["completion_ids"]), "reward": point["reward"], "accuracy": point["accuracy"],
                    "format": point["format"], "status": point["status"], "extracted": point["extracted"],
                    "reason": point["reason"], "finish_reason": roll["finish_reason"],
                    "advantage": float(advantage[i]), "version": max(roll["versions"])})
        rows = rows if limit < 0 else rows[:limit]
        beside = self.directory / f".step_{step:05d}.partial"
        pq.write_table(pa.Table.from_pylist(rows), beside)
        beside.rename(self.directory / f"step_{step:05d}.parquet")
        return len(rows)


class RolloutLog:
    """The trainer's side of RolloutWriter: fire and forget, at most a few writes behind, failures told at the end."""

    BEHIND = 4

    def __init__(self, directory: Path, tokenizer_path: str, limit: int) -> None:
        self.limit, self.waiting = limit, []
        env = {"env_vars": {**process_env(), "OMP_NUM_THREADS": "1"}}
        self.actor = None if limit == 0 else ray.remote(RolloutWriter).options(
            name="rollout-writer", num_cpus=0, runtime_env=env).remote(str(directory), tokenizer_path)

    def write(self, step: int, groups: list[Group], scored: list[Any], advantages: list[list[float]]) -> None:
        if self.actor is None:
            return
        used = len(groups) if self.limit < 0 else next(
            (i + 1 for i in range(len(groups)) if sum(len(g.meta.lengths) for g in groups[: i + 1]) >= self.limit),
            len(groups))
        self.waiting.append(self.actor.write.remote(
            step, [g.prompt.text for g in groups[:used]], [g.table for g in groups[:used]],
            [ray.put(s) for s in scored[:used]], advantages[:used], self.limit))
        while len(self.waiting) > self.BEHIND:
            get(self.waiting.pop(0), 120.0, "rollout-writer: write", HINT)

    def flush(self) -> None:
        get(self.waiting, 120.0, "rollout-writer: write", HINT)
        self.waiting = []
