"""Given answers as groups: the data source of SFT and DPO. They enter the loop where generated groups do.

A demonstration is tokenised once, ends with the end-of-text id, and carries policy version -1 (no policy drew it).
SFT: one answer a prompt, reward 1. DPO: two answers a prompt, chosen first, rewards 1 and 0.

Where the answers come from: columns `completion`, or `chosen` and `rejected`, of the data file (Prompt.extra); for the
arithmetic task the worked solutions of actors/data/corpus.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.data import corpus
from actors.data.prompt import Prompt
from actors.records import ROLLOUT, SCORED, GroupMeta
from actors.rollouts import Group
from conf.schema import ConfigError

COLUMNS = {"dataset": ("completion",), "pairs": ("chosen", "rejected")}


def given_answers(prompt: Prompt, kind: str, seed: int) -> list[str]:
    """The answers `kind` ("dataset" | "pairs") asks for. Raises ConfigError naming the missing column."""
    if all(c in prompt.extra for c in COLUMNS[kind]):
        return [str(prompt.extra[c]) for c in COLUMNS[kind]]
    if prompt.data_source.startswith("arithmetic"):
        numbers = [int(n) for n in prompt.question.removesuffix("=?").split("+")]
        rng = corpus.stable_rng("demonstration", seed, prompt.prompt_id)
        good = corpus.answer(*corpus.running_sum(rng, numbers, slip=0.0))
        bad = corpus.answer(rng.choice(corpus.FILLERS), corpus.near_miss(rng, sum(numbers)))
        return [good] if kind == "dataset" else [good, bad]
    missing = next(c for c in COLUMNS[kind] if c not in prompt.extra)
    raise ConfigError(
        "data.path",
        prompt.data_source,
        f"prompt {prompt.prompt_id} has no column {missing!r}, which this algorithm learns from",
        f"Add the column{'s' * (kind == 'pairs')} {', '.join(COLUMNS[kind])}.",
    )


def given_group(
    group_id: int,
    prompt: Prompt,
    prompt_ids: list[int],
    tokenizer: Any,
    kind: str,
    seed: int,
    max_tokens: int,
) -> tuple[Group, pa.RecordBatch]:
    """(Group, SCORED) of a prompt's given answers; an answer over `max_tokens` is cut and says so (length)."""
    answers = given_answers(prompt, kind, seed)
    whole = [
        tokenizer(a, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        for a in answers
    ]
    ids = [a[:max_tokens] for a in whole]
    reasons = ["length" if len(a) > max_tokens else "stop" for a in whole]
    n = len(ids)
    table = pa.RecordBatch.from_arrays(
        [
            pa.array([group_id] * n, pa.int64()),
            pa.array([prompt.prompt_id] * n),
            pa.array(range(n), pa.int32()),
            pa.array([prompt_ids] * n, pa.list_(pa.int32())),
            pa.array(ids, pa.list_(pa.int32())),
            pa.array([[0.0] * len(a) for a in ids], pa.list_(pa.float32())),
            pa.array([[-1] * len(a) for a in ids], pa.list_(pa.int32())),
            pa.array(reasons),
        ],
        schema=ROLLOUT,
    )
    scored = pa.RecordBatch.from_pydict(
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
    meta = GroupMeta(
        group_id,
        prompt.prompt_id,
        len(prompt_ids),
        np.array([len(a) for a in ids], np.int64),
        tuple(reasons),
        -1,
        -1,
        "data",
    )
    return Group(prompt, meta, ray.put(table)), scored
