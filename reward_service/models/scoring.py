"""Answers in, scores out: one reward model over packed micro-batches. Torch, no Ray.

Peak memory is that of one micro-batch of `budget` padded tokens, or of the longest answer, whatever the number of
answers (tests/flow/reward_service/test_reward_models.py measures it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.modeling.packing import pack
from reward_service.combine import ModelScore
from reward_service.models.heads import ImplicitRewardModel, RewardModel, read_scores
from reward_service.models.meaning import Meaning


@dataclass(frozen=True)
class Answer:
    """`ids` int [T]: prompt and completion, which begins at `begin`; `ends`: positions in it that are read."""

    ids: np.ndarray
    begin: int
    ends: list[int]


def score(
    model: RewardModel | ImplicitRewardModel,
    how: Meaning,
    answers: Sequence[Answer],
    budget: int,
    device: Any,
    between: Callable[[], object] = lambda: None,
) -> list[np.ndarray]:
    """float64 [ends] of each answer. Micro-batches hold at most `budget` padded tokens; a longer answer goes alone.
    `between` is called before each of them."""
    lengths = np.array([len(a.ids) for a in answers], np.int64)
    micro = pack(lengths, budget)
    found: list[Any] = [None] * len(answers)
    with torch.no_grad():
        for m in range(int(micro.max(initial=-1)) + 1):
            between()
            members = np.flatnonzero(micro == m)
            ids = torch.zeros(len(members), int(lengths[members].max()), dtype=torch.long)
            for row, i in enumerate(members):
                ids[row, : lengths[i]] = torch.from_numpy(answers[i].ids.astype(np.int64))
            counts = [len(answers[i].ends) for i in members]
            rows = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(counts))
            columns = torch.tensor([e for i in members for e in answers[i].ends])
            begins = torch.tensor([answers[i].begin for i in members])
            logits = model(ids.to(device), rows.to(device), columns.to(device), begins.to(device))
            for i, piece in zip(
                members, read_scores(logits, how).cpu().double().split(counts), strict=True
            ):
                found[i] = piece.numpy()
    return found


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
    """A verdict on each completion; `ends`: of its steps (the last is its last token), read by a process model alone;
    `between`: see `score`.

    An answer that does not fit into the model's context, or has no token, is ungradable; a score that is not finite
    an error: neither is ever a number."""
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
                Answer(
                    np.concatenate([prompt, completion]),
                    len(prompt),
                    [len(prompt) + e for e in inside],
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
