"""The log of rollouts: an actor that writes completions with their text, and the run's side of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from actors.rollouts import Group
from cluster.environment import process_env
from cluster.supervision.failures import line
from cluster.supervision.health import RestartsExhausted
from cluster.supervision.remote import get
from cluster.supervision.supervisor import Supervised, tell

HINT = "the reward service's log in the session's logs folder of Ray"


class RolloutWriter:
    """Ray actor: decodes completions and writes rollouts/step_N.parquet, so that no token passes the controller."""

    def __init__(self, directory: str, tokenizer_path: str) -> None:
        from transformers import AutoTokenizer

        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)

    def __repr__(self) -> str:
        return "rollout-writer"

    def write(
        self,
        step: int,
        texts: list[str],
        tables: list[Any],
        scored: list[Any],
        advantages: list[list[float]],
        limit: int,
    ) -> int:
        """One file of at most `limit` rows (-1: all): text, reward, status, version ... Returns the rows written."""
        rows: list[dict[str, Any]] = []
        for text, table, score, advantage in zip(
            texts, ray.get(tables, timeout=60), ray.get(scored, timeout=60), advantages, strict=True
        ):
            completions = self.tokenizer.batch_decode(
                table.column("completion_ids").to_pylist(),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            for i, (roll, point) in enumerate(
                zip(table.to_pylist(), score.to_pylist(), strict=True)
            ):
                rows.append(
                    {
                        "step": step,
                        "group_id": roll["group_id"],
                        "prompt_id": roll["prompt_id"],
                        "sample_index": roll["sample_index"],
                        "prompt": text,
                        "completion": completions[i],
                        "length": len(roll["completion_ids"]),
                        "reward": point["reward"],
                        "accuracy": point["accuracy"],
                        "format": point["format"],
                        "status": point["status"],
                        "extracted": point["extracted"],
                        "reason": point["reason"],
                        "finish_reason": roll["finish_reason"],
                        "advantage": float(advantage[i]),
                        "version": max(roll["versions"]),
                    }
                )
        rows = rows if limit < 0 else rows[:limit]
        beside = self.directory / f".step_{step:05d}.partial"
        pq.write_table(pa.Table.from_pylist(rows), beside)
        beside.rename(self.directory / f"step_{step:05d}.parquet")
        return len(rows)


class RolloutLog:
    """The trainer's side of RolloutWriter: fire and forget, at most a few writes behind. A dead writer is replaced and
    writes what is missing; a step whose rows cannot be written is told, and costs the run nothing else."""

    BEHIND, WAIT_S = 4, 120.0

    def __init__(self, cfg: Any, directory: Path, tokenizer_path: str) -> None:
        self.limit = cfg.logging.rollouts
        self.waiting: dict[
            int, tuple[Any, tuple[Any, ...]]
        ] = {}  # step -> (reference, what was sent)
        self.lost: list[int] = []  # steps
        env = {"env_vars": {**process_env(), "OMP_NUM_THREADS": "1"}}
        self.member = (
            None
            if self.limit == 0
            else Supervised(
                "rollout-writer",
                lambda suffix: [
                    ray.remote(RolloutWriter)
                    .options(name=f"rollout-writer{suffix}", num_cpus=0, runtime_env=env)
                    .remote(str(directory), tokenizer_path)
                ],
                cfg.cluster,
                "cluster.restarts",
                cfg.cluster.restarts,
                self.WAIT_S,
                HINT,
            )
        )

    @property
    def restarts(self) -> int:
        return self.member.health.restarts if self.member else 0

    def start(self) -> None:
        if self.member:
            self.member.start()

    def write(
        self, step: int, groups: list[Group], scored: list[Any], advantages: np.ndarray
    ) -> None:
        """`advantages` float [N]: of all samples of `groups`, in their order."""
        if self.member is None:
            return
        used = (
            len(groups)
            if self.limit < 0
            else next(
                (
                    i + 1
                    for i in range(len(groups))
                    if sum(len(g.meta.lengths) for g in groups[: i + 1]) >= self.limit
                ),
                len(groups),
            )
        )
        each = np.split(advantages, np.cumsum([len(g.meta.lengths) for g in groups])[:-1])
        self._send(
            (
                step,
                [g.prompt.text for g in groups[:used]],
                [g.table for g in groups[:used]],
                [ray.put(s) for s in scored[:used]],
                [part.tolist() for part in each[:used]],
                self.limit,
            )
        )
        while len(self.waiting) > self.BEHIND:
            self._wait_for(next(iter(self.waiting)))

    def flush(self) -> None:
        """Until everything that can be written is written."""
        while self.waiting:
            self._wait_for(next(iter(self.waiting)))

    def _send(self, job: tuple[Any, ...]) -> None:
        self.waiting[job[0]] = (self.member.actor.write.remote(*job), job)

    def _wait_for(self, step: int) -> None:
        try:
            get(self.waiting[step][0], self.WAIT_S, f"rollout-writer: step {step}", HINT)
        except Exception as error:  # noqa: BLE001 - classified
            try:
                self.member.replace(
                    error, lambda: [self._send(job) for _, job in list(self.waiting.values())]
                )
                return
            except (OSError, RestartsExhausted) as final:
                self.lost.append(step)
                tell(f"rollouts of step {step} are not written: {line(final)}")
        del self.waiting[step]
