"""The reward service: takes rollouts and returns rewards.

It is a plain class, which the reward client runs as a Ray actor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from actors.records import SCORED
from reward_service.processes import RewardPool
from reward_service.rules.item import RewardItem, RewardResult
from reward_service.step_labels.steps import STEP_RULES, token_steps


class RewardService:
    """Scores batches of rollouts. It decodes the sampled token ids and never tokenises text again.

    `reward_cfg` is a mapping with rules, combine, timeout_s, steps and options (see conf/reward).
    `tokenizer_path` is a local directory. `workers` is the largest number of scoring processes; a
    number below 1 means reward_cfg["workers"].
    """

    def __init__(self, reward_cfg: Mapping[str, Any], tokenizer_path: str, workers: int = 0):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
        self.steps = STEP_RULES.get(reward_cfg.get("steps") or "")
        self.max_tokens = int((reward_cfg.get("options") or {}).get("max_tokens", 0))
        self.pool = RewardPool(
            reward_cfg, workers if workers > 0 else int(reward_cfg.get("workers", 1))
        )

    def __repr__(self) -> str:
        return "rewards"  # in the logs and on the dashboard

    def score(
        self, rollouts: pa.RecordBatch, prompts: Sequence[Mapping[str, Any]]
    ) -> pa.RecordBatch:
        """Returns one SCORED row for each row of `rollouts` (ROLLOUT), in the same order.

        `prompts` holds the fields of a Prompt for every prompt_id of the rollouts. Raises KeyError
        for a prompt_id that is not among them, and RewardPoolError if workers cannot start.
        """
        by_id = {prompt["prompt_id"]: prompt for prompt in prompts}
        rows = rollouts.select(
            ["group_id", "prompt_id", "sample_index", "completion_ids", "finish_reason"]
        ).to_pylist()
        if missing := sorted({row["prompt_id"] for row in rows} - set(by_id)):
            raise KeyError(
                f"rollouts name {len(missing)} prompt_ids that were not passed, "
                f"such as {missing[0]!r}"
            )
        texts = self.tokenizer.batch_decode(
            [row["completion_ids"] for row in rows],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        results = self.pool.score(
            [
                self._item(by_id[row["prompt_id"]], row, text)
                for row, text in zip(rows, texts, strict=True)
            ]
        )
        steps = [
            self._steps(by_id[row["prompt_id"]], row, text, result)
            for row, text, result in zip(rows, texts, results, strict=True)
        ]
        return pa.RecordBatch.from_pydict(
            {
                "group_id": rollouts.column("group_id"),
                "sample_index": rollouts.column("sample_index"),
                "reward": [result.total if result.status == "ok" else None for result in results],
                "parts": [list(result.parts.items()) for result in results],
                "accuracy": [result.parts.get("accuracy") for result in results],
                "format": [result.parts.get("format") for result in results],
                "status": [result.status for result in results],
                **{
                    name: [
                        getattr(result, name).encode("utf-8", "replace").decode()
                        for result in results
                    ]
                    for name in ("extracted", "reason")
                },  # lone surrogates are not valid in Arrow
                "step_rewards": [rewards for rewards, _ in steps],
                "step_ends": [ends for _, ends in steps],
            },
            schema=SCORED,
        )

    def _item(self, prompt: Mapping[str, Any], row: Mapping[str, Any], text: str) -> RewardItem:
        return RewardItem(
            id=f"{row['group_id']}/{row['sample_index']}",
            response=prompt.get("prefill", "") + text,
            gold=prompt["gold"],
            prompt=prompt.get("text", ""),
            task=prompt.get("task", "math"),
            data_source=prompt.get("data_source", ""),
            completion_tokens=len(row["completion_ids"]),
            max_tokens=self.max_tokens,
            truncated=row["finish_reason"] == "length",
            extra=dict(prompt.get("extra") or {}),
        )

    def _steps(
        self, prompt: Mapping[str, Any], row: Mapping[str, Any], text: str, result: RewardResult
    ) -> tuple[list[float] | None, list[int] | None]:
        """(rewards, token indices) of the steps of an answer.

        (None, None) if no step rule is set, or if the answer has no tokens or no reward.
        """
        if self.steps is None or result.status != "ok" or not row["completion_ids"]:
            return None, None
        prefill = prompt.get("prefill", "")

        def decode(ids: Sequence[int]) -> str:
            return self.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

        return token_steps(
            self.steps(prefill + text), len(prefill), row["completion_ids"], result.total, decode
        )

    def stats(self) -> dict[str, Any]:
        """Counts by status, worker deaths and kills; one example (text) of each status but ok."""
        return self.pool.report()

    def close(self) -> None:
        """Stops the worker processes."""
        self.pool.close()
