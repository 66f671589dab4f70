"""The ranks that train one reward model: one optimizer step, all steps, and how good the model is.

Labelled answers are tables in the object store; the driver holds scalars alone (DESIGN invariant
8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.schema import Config
from learner.algorithms import reward_batches
from learner.algorithms.schedule import learning_rate
from learner.engine import reward_rank
from learner.engine.group import LearnerGroup
from learner.evaluation import reward_models
from reward_service.models.labelled import Answers

SUMMARY = ("auc", "accuracy", "loss", "brier", "calibration_error")


@dataclass(frozen=True)
class Drawn:
    """The answers of a training, and which of them each optimizer step uses.

    `units`: what is drawn as one, an answer or a pair, as arrays of positions in `answers`;
    `chosen[s]`: positions in `units` of optimizer step s, counted from 0.
    """

    answers: Answers
    units: list[np.ndarray]
    chosen: list[np.ndarray]


class RewardLearner:
    """Trains the reward model that begins as `path`, a causal LM or a reward model."""

    def __init__(self, cfg: Config, path: str) -> None:
        self.cfg = cfg.reward_model
        self.settings = reward_rank.settings(cfg, path)
        self.group = LearnerGroup(self.settings, reward_rank.RewardRank, "reward_learner")

    def draw(self, fresh: Answers, old: Answers | None, seed: int) -> Drawn:
        """Which answers each of reward_model.steps optimizer steps trains on.

        `fresh` are answers of this iteration, `old` those of earlier ones, of which each step takes
        the share reward_model.replay.
        """
        rm = self.cfg
        answers = fresh + old if old else fresh
        units = reward_batches.units(answers, rm.loss)
        count = len(reward_batches.units(fresh, rm.loss))
        chosen = reward_batches.draw(count, len(units) - count, rm.batch, rm.steps, rm.replay, seed)
        return Drawn(answers, units, chosen)

    def train_step(self, drawn: Drawn, number: int) -> dict[str, Any]:
        """Optimizer step `number`, counted from 1. Returns what LearnerGroup.update does.

        Raises LearnerLost where a rank is gone.
        """
        rm, lr, index = self.cfg, self.settings.learner, number - 1
        job = reward_batches.make_job(
            drawn.answers,
            [drawn.units[i] for i in drawn.chosen[index]],
            rm.loss,
            lr.ranks,
            lr.micro_batch_tokens,
            index,
            learning_rate(self.settings.optimizer, index, rm.steps),
        )
        return self.group.update(job)

    def fit(self, fresh: Answers, old: Answers | None, seed: int) -> None:
        """All reward_model.steps optimizer steps. Raises LearnerLost: start over."""
        drawn = self.draw(fresh, old, seed)
        for number in range(1, self.cfg.steps + 1):
            self.train_step(drawn, number)

    def measure(self, answers: Answers) -> dict[str, float | None]:
        """How good the model is on these answers (learner/evaluation/reward_models.py)."""
        lr = self.settings.learner
        job = reward_batches.make_job(
            answers,
            reward_batches.units(answers, "pointwise"),
            "pointwise",
            lr.ranks,
            lr.micro_batch_tokens,
        )
        logits = dict(self.group.score(job))
        return reward_models.measure(
            [logits[i] for i in range(len(answers))], answers, self.cfg.loss
        )


def summary_line(measures: Mapping[str, float | None]) -> str:
    """The measures that are known, for one line of output."""
    known = [(name, measures.get(name)) for name in SUMMARY]
    return ", ".join(f"{name} {value:.3f}" for name, value in known if value is not None)
