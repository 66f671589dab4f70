"""The log of rollouts: an actor that writes completions with their text, and the driver's side of
it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from actors.rollouts import Group
from cluster.environment import process_env
from cluster.files import atomic
from cluster.supervision.failures import line
from cluster.supervision.health import RestartsExhausted
from cluster.supervision.pool import Pool
from cluster.supervision.supervisor import Supervised, tell

HINT = "the reward service's log in the session's logs folder of Ray"


class RolloutWriter:
    """Ray actor that decodes completions and writes rollouts/step_N.parquet, so that the driver
    handles no token."""

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
        """Write the file of a step, a row for each completion; returns the number of rows.

        texts: the prompt of each group. tables, scored: references of a ROLLOUT and a SCORED batch
            for each group.
        advantages: one list of floats for each group. limit: the most rows that are written; -1:
            all."""
        rows: list[dict[str, Any]] = []
        for prompt, table, scores, values in zip(
            texts, ray.get(tables, timeout=60), ray.get(scored, timeout=60), advantages, strict=True
        ):
            completions = self.tokenizer.batch_decode(
                table.column("completion_ids").to_pylist(),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            for i, (rollout, score) in enumerate(
                zip(table.to_pylist(), scores.to_pylist(), strict=True)
            ):
                rows.append(
                    {
                        "step": step,
                        "group_id": rollout["group_id"],
                        "prompt_id": rollout["prompt_id"],
                        "sample_index": rollout["sample_index"],
                        "prompt": prompt,
                        "completion": completions[i],
                        "length": len(rollout["completion_ids"]),
                        "reward": score["reward"],
                        "accuracy": score["accuracy"],
                        "format": score["format"],
                        "status": score["status"],
                        "extracted": score["extracted"],
                        "reason": score["reason"],
                        "finish_reason": rollout["finish_reason"],
                        "advantage": float(values[i]),
                        "version": max(rollout["versions"]),
                    }
                )
        rows = rows if limit < 0 else rows[:limit]
        with atomic(self.directory / f"step_{step:05d}.parquet") as partial_file:
            pq.write_table(pa.Table.from_pylist(rows), partial_file)
        return len(rows)


class RolloutLog:
    """The driver's side of RolloutWriter. Writes happen in the background, at most BEHIND of them
    at a time.

    A writer that dies is replaced, and its successor writes what is missing. A step whose rows
    cannot be written is reported, and the run goes on."""

    BEHIND, WAIT_S = 4, 120.0

    def __init__(self, cfg: Any, directory: Path, tokenizer_path: str) -> None:
        self.limit = cfg.logging.rollouts  # rows a step; -1: all, 0: no log
        self.directory, self.tokenizer_path = directory, tokenizer_path
        self.lost: list[int] = []  # steps whose rows could not be written
        writer = partial(
            Supervised,
            "rollout-writer",
            self._create,
            cfg.cluster,
            "cluster.restarts",
            cfg.cluster.restarts,
            self.WAIT_S,
            HINT,
        )
        self.pool = Pool([writer()] if self.limit else [])

    def _create(self, suffix: str) -> list[Any]:
        env = {"env_vars": {**process_env(), "OMP_NUM_THREADS": "1"}}
        return [
            ray.remote(RolloutWriter)
            .options(name=f"rollout-writer{suffix}", num_cpus=0, runtime_env=env)
            .remote(str(self.directory), self.tokenizer_path)
        ]

    @property
    def restarts(self) -> int:
        """How often the writer was started again."""
        return self.pool.restarts

    def start(self) -> None:
        """Wait until the writer is up."""
        self.pool.start()

    def write(
        self, step: int, groups: list[Group], scored: list[Any], advantages: np.ndarray
    ) -> None:
        """Write the rows of a step in the background. `scored`: a SCORED batch for each group;
        `advantages` float [N]: of all samples of the groups, in their order."""
        if self.limit == 0:
            return
        sizes = [len(group.meta.lengths) for group in groups]
        used = groups_needed(sizes, self.limit)
        each = np.split(advantages, np.cumsum(sizes)[:-1])
        arguments = (
            step,
            [g.prompt.text for g in groups[:used]],
            [g.table for g in groups[:used]],
            [ray.put(s) for s in scored[:used]],
            [part.tolist() for part in each[:used]],
            self.limit,
        )
        self.pool.give(step, 0, lambda writer: writer.write.remote(*arguments))
        while len(self.pool.unanswered) > self.BEHIND:
            self._finish_oldest()

    def flush(self) -> None:
        """Wait until everything that can be written is written."""
        while self.pool.unanswered:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait until the oldest unfinished step is written or known to be lost."""
        step = next(iter(self.pool.unanswered))
        try:
            self.pool.collect(step, self.WAIT_S, f"rollout-writer: step {step}")
        except (OSError, RestartsExhausted) as error:
            del self.pool.unanswered[step]
            self.lost.append(step)
            tell(f"rollouts of step {step} are not written: {line(error)}")


def groups_needed(sizes: list[int], limit: int) -> int:
    """Return how many of the first groups hold `limit` samples, by their sizes in samples. -1: all
    groups."""
    if limit < 0:
        return len(sizes)
    enough = np.flatnonzero(np.cumsum(sizes) >= limit)
    return int(enough[0]) + 1 if len(enough) else len(sizes)
