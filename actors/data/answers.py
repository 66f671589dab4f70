"""The answers that a data set contains, as the records of a finished group: for SFT and DPO.

SFT (kind "dataset") has one answer a prompt, with reward 1. DPO (kind "pairs") has two, the chosen
one first, with rewards 1 and 0. An answer is tokenised once, ends with the end-of-text id, and
carries policy version -1, because no policy sampled it.

The answers stand in the columns `completion`, or `chosen` and `rejected`, of the data file
(Prompt.extra). For the arithmetic task they are generated as worked solutions, by
actors/data/corpus.py. Pure: NumPy and pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from actors.data import corpus
from actors.data.prompt import Prompt, stable_rng
from actors.records import ROLLOUT, SCORED, GroupMeta
from conf.schema import ConfigError

COLUMNS = {"dataset": ("completion",), "pairs": ("chosen", "rejected")}
NO_VERSION = -1


@dataclass(frozen=True)
class GivenRequest:
    """A prompt whose given answers become the group `group_id`."""

    group_id: int
    prompt: Prompt
    prompt_ids: list[int]


def check_answers(prompt: Prompt, kind: str) -> None:
    """Raise ConfigError, naming the missing column, where a prompt has no answers of `kind`."""
    missing = [c for c in COLUMNS[kind] if c not in prompt.extra]
    if missing and not prompt.data_source.startswith("arithmetic"):
        raise ConfigError(
            "data.path",
            prompt.data_source,
            f"prompt {prompt.prompt_id} has no column {missing[0]!r}, which this algorithm learns "
            "from",
            f"Add the column{'s' * (kind == 'pairs')} {', '.join(COLUMNS[kind])}.",
        )


def given_answers(prompt: Prompt, kind: str, seed: int) -> list[str]:
    """The texts of a prompt's answers of `kind` ("dataset" | "pairs"): one, or chosen and rejected.

    `seed` decides the generated ones. Raises ConfigError where there are none.
    """
    check_answers(prompt, kind)
    if all(c in prompt.extra for c in COLUMNS[kind]):
        return [str(prompt.extra[c]) for c in COLUMNS[kind]]
    numbers = [int(n) for n in prompt.question.removesuffix("=?").split("+")]
    rng = stable_rng("demonstration", seed, prompt.prompt_id)
    right = corpus.answer(*corpus.running_sum(rng, numbers, slip=0.0))
    wrong = corpus.answer(rng.choice(corpus.FILLERS), corpus.near_miss(rng, sum(numbers)))
    return [right] if kind == "dataset" else [right, wrong]


def answer_records(
    group_id: int,
    prompt: Prompt,
    prompt_ids: list[int],
    tokenizer: Any,
    kind: str,
    seed: int,
    max_tokens: int,
) -> tuple[GroupMeta, pa.RecordBatch, pa.RecordBatch]:
    """(scalars, SCORED, ROLLOUT) of a prompt's answers.

    An answer over `max_tokens` is cut there and gets the finish reason "length". Raises ConfigError
    where the prompt has no answers.
    """
    full = [
        tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        for text in given_answers(prompt, kind, seed)
    ]
    ids = [answer[:max_tokens] for answer in full]
    reasons = ["length" if len(answer) > max_tokens else "stop" for answer in full]
    meta = GroupMeta(
        group_id,
        prompt.prompt_id,
        len(prompt_ids),
        np.array([len(answer) for answer in ids], np.int64),
        tuple(reasons),
        NO_VERSION,
        NO_VERSION,
        "data",
    )
    return meta, _scored(group_id, len(ids)), _rollout(meta, prompt_ids, ids)


def _rollout(meta: GroupMeta, prompt_ids: list[int], ids: list[list[int]]) -> pa.RecordBatch:
    """ROLLOUT of answers with these completion ids. The behaviour log-probs are 0."""
    n = len(ids)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([meta.group_id] * n, pa.int64()),
            pa.array([meta.prompt_id] * n),
            pa.array(range(n), pa.int32()),
            pa.array([prompt_ids] * n, pa.list_(pa.int32())),
            pa.array(ids, pa.list_(pa.int32())),
            pa.array([[0.0] * len(answer) for answer in ids], pa.list_(pa.float32())),
            pa.array([[NO_VERSION] * len(answer) for answer in ids], pa.list_(pa.int32())),
            pa.array(meta.finish_reasons),
        ],
        schema=ROLLOUT,
    )


def _scored(group_id: int, n: int) -> pa.RecordBatch:
    """SCORED of `n` answers: the first has reward 1, the second 0."""
    return pa.RecordBatch.from_pydict(
        {
            "group_id": [group_id] * n,
            "sample_index": list(range(n)),
            "reward": [1.0, 0.0][:n],
            "parts": [[]] * n,
            "accuracy": [None] * n,
            "format": [None] * n,
            "status": ["ok"] * n,
            "extracted": [""] * n,
            "reason": ["given"] * n,
            "step_rewards": [None] * n,
            "step_ends": [None] * n,
        },
        schema=SCORED,
    )


def records_of_groups(
    requests: Sequence[GivenRequest], tokenizer: Any, kind: str, seed: int, max_tokens: int
) -> tuple[Any, ...]:
    """The body of a Ray task that builds several groups.

    Returns a list of (scalars, SCORED), one a request, followed by the ROLLOUT tables, each of them
    a return value of its own: 1 + len(requests) values.
    """
    records = [
        answer_records(r.group_id, r.prompt, r.prompt_ids, tokenizer, kind, seed, max_tokens)
        for r in requests
    ]
    return [(meta, scored) for meta, scored, _ in records], *(table for _, _, table in records)
