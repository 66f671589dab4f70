"""Scores answers with one reward model, in packed micro-batches.

The peak memory is that of one micro-batch of `budget` padded tokens, or of the longest answer. It
does not grow with the number of answers (tests/flow/reward_service/test_reward_models.py measures
it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from actors.modeling.packing import PackedBatch, TokenSequence, pack_sequences, run_packed
from reward_service.combine import ModelScore
from reward_service.models.heads import ImplicitRewardModel, RewardModel, read_scores
from reward_service.models.meaning import Meaning


def score(
    model: RewardModel | ImplicitRewardModel,
    how: Meaning,
    answers: Sequence[TokenSequence],
    budget: int,
    device: Any,
    between: Callable[[], object] = lambda: None,
) -> list[np.ndarray]:
    """Return the scores of each answer at its positions, float64 [K].

    A micro-batch holds at most `budget` tokens with its padding; a longer answer gets its own.
    `between` is called before each micro-batch.
    """

    def forward(batch: PackedBatch) -> torch.Tensor:
        logits = model(batch.ids, batch.rows, batch.columns, batch.begins)
        return read_scores(logits, how).double()

    micro_batches = pack_sequences(answers, budget)
    return run_packed(forward, answers, micro_batches, device, before=between)


def judge(
    model: RewardModel | ImplicitRewardModel,
    how: Meaning,
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    ends: Sequence[list[int]],
    budget: int,
    device: Any = "cpu",
    between: Callable[[], object] = lambda: None,
) -> list[ModelScore]:
    """The score of each completion, with a status.

    `ends` holds the index of the last token of each step, of which the last is the completion's
    last token; only a process model reads it. `between` is called before each micro-batch. An
    answer that has no token or exceeds the model's context is "ungradable", and a score that is not
    finite is an "error". Neither gets a number.
    """
    context = getattr(model.model.config, "max_position_embeddings", None) or math.inf
    out: list[ModelScore | None] = [None] * len(completions)
    answers, places = [], []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        n = len(prompt) + len(completion)
        if not len(completion):
            out[i] = ModelScore("ungradable", None, "an answer without a token")
        elif n > context:
            out[i] = ModelScore(
                "ungradable", None, f"{n} tokens are over the reward model's context of {context}"
            )
        else:
            inside = ends[i] if how.kind == "process" else [len(completion) - 1]
            answers.append(
                TokenSequence(
                    np.concatenate([prompt, completion]),
                    len(prompt),
                    len(prompt) + np.array(inside, np.int64),
                )
            )
            places.append(i)
    for i, values in zip(places, score(model, how, answers, budget, device, between), strict=True):
        if not np.isfinite(values).all():
            out[i] = ModelScore(
                "error", None, f"the reward model's score is {values[~np.isfinite(values)][0]}"
            )
            continue
        steps = (values.tolist(), ends[i]) if how.kind == "process" else None
        out[i] = ModelScore("ok", float(values.min()), "", steps)
    return out
