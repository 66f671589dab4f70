"""One DeepSpeed rank that trains a reward model: the learner's own path with another module and another loss.

`cfg.model.path` names what it begins with (a causal LM or a reward model), `cfg.optimizer.lr` its learning rate: see
`settings`, which makes such a configuration of a run's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from actors.records import ragged
from cluster.monitoring.stat import Stat
from learner.algorithms.reward_training import RewardJob
from learner.engine.rank import LearnerRank, Stats, accumulate
from reward_service.models.meaning import KEY, Meaning

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Answer:
    """`index`: row of the plan, the same on all ranks; `begin` (of the completion), `ends`: positions in `ids`."""

    index: int
    micro_batch: int
    ids: np.ndarray
    begin: int
    ends: np.ndarray
    labels: np.ndarray
    weight: float


@dataclass
class _Batch:
    """Right-padded ids int64 [B, T]; begins int64 [B]; rows, columns int64 [M]: the ends; labels, weights [M]."""

    answers: list[_Answer]
    empty: bool
    ids: Tensor
    begins: Tensor
    rows: Tensor
    columns: Tensor
    labels: Tensor
    weights: Tensor


def settings(cfg: Any, path: str) -> Any:
    """The run's configuration, for ranks that train the reward model which begins as `path`."""
    model = dataclasses.replace(cfg.model, path=path, init="pretrained", gguf_file="", tokenizer="")
    return dataclasses.replace(
        cfg,
        model=model,
        optimizer=dataclasses.replace(cfg.optimizer, lr=cfg.reward_model.lr),
        algorithm=dataclasses.replace(cfg.algorithm, critic=False),
    )


class RewardRank(LearnerRank):
    """Ray actor, as LearnerRank but for `update` (a RewardJob) and `score`."""

    def __repr__(self) -> str:
        return f"reward_learner-{self.rank}"

    def build(self) -> Any:
        from reward_service.models.heads import load_reward_model

        rm = self.cfg.reward_model
        module = load_reward_model(
            self.cfg.model.path,
            self.cfg.model.dtype,
            False,
            rm.head,
            rm.beta,
            self.cfg.learner.logprob_chunk_tokens,
        )
        how = Meaning(
            rm.kind,
            rm.loss == "pointwise",
            self.cfg.data.steps if rm.kind == "process" else "",
            rm.head,
            rm.beta if rm.head == "implicit" else 0.0,
        )
        setattr(module.model.config, KEY, dataclasses.asdict(how))
        return module

    def update(self, job: RewardJob) -> dict[str, Any]:
        """One optimizer step; returns what LearnerRank.update does."""
        from learner.algorithms.losses import REWARD_LOSSES

        answers, stats = self._answers(job), Stats()

        def loss(m: int) -> tuple[Tensor, Stats, bool]:
            b = self._batch([a for a in answers if a.micro_batch == m], job.loss)
            logits = self.engine(b.ids, b.rows, b.columns, b.begins)
            value, found = REWARD_LOSSES[job.loss](logits, b.labels, b.weights)
            total = float(value)
            return value, found | {"loss": Stat(total, 1.0 / self.world, total, total)}, b.empty

        finite = accumulate(self.engine, job.micro_batches, loss, stats)
        return {"stats": stats, "steps": [self._step(job.learning_rate, finite)]}

    def score(self, job: RewardJob) -> list[tuple[int, list[float]]]:
        """(row of the plan, logits at its ends) of each answer of this rank."""
        import torch

        answers, found = self._answers(job), []
        with torch.no_grad():
            for m in range(job.micro_batches):
                b = self._batch([a for a in answers if a.micro_batch == m], job.loss)
                logits = (
                    self.engine(b.ids, b.rows, b.columns, b.begins)
                    .cpu()
                    .split([len(a.ends) for a in b.answers])
                )
                found += (
                    []
                    if b.empty
                    else [
                        (a.index, piece.tolist())
                        for a, piece in zip(b.answers, logits, strict=True)
                    ]
                )
        return found

    def _answers(self, job: RewardJob) -> list[_Answer]:
        mine = [(i, r) for i, r in enumerate(job.plan.to_pylist()) if r["rank"] == self.rank]
        wanted = sorted({r["table"] for _, r in mine})
        tables = dict(
            zip(
                wanted,
                ray.get([job.tables[t] for t in wanted], timeout=self.cfg.learner.timeout_s),
                strict=True,
            )
        )
        tokens = {
            t: [ragged(b.column(name)) for name in ("prompt_ids", "completion_ids")]
            for t, b in tables.items()
        }
        found = []
        for i, r in mine:
            prompt, completion = (column[r["row"]] for column in tokens[r["table"]])
            found.append(
                _Answer(
                    i,
                    r["micro_batch"],
                    np.concatenate([prompt, completion]),
                    len(prompt),
                    len(prompt) + np.array(r["step_ends"], np.int64),
                    np.array(r["step_rewards"]),
                    r["weight"],
                )
            )
        return found

    def _batch(self, chosen: list[_Answer], loss: str) -> _Batch:
        """Tensors of `chosen`; where there are none, of answers of weight 0: a backward is a collective under ZeRO."""
        import torch

        nothing = _Answer(-1, 0, np.zeros(2, np.int64), 1, np.ones(1, np.int64), np.zeros(1), 0.0)
        answers = chosen or [nothing] * (2 if loss == "pairwise" else 1)
        ids = np.zeros((len(answers), max(len(a.ids) for a in answers)), np.int64)
        for i, a in enumerate(answers):
            ids[i, : len(a.ids)] = a.ids
        counts = [len(a.ends) for a in answers]
        arrays = (
            ids,
            np.array([a.begin for a in answers], np.int64),
            np.repeat(np.arange(len(answers)), counts),
            np.concatenate([a.ends for a in answers]),
            np.concatenate([a.labels for a in answers]),
            np.repeat([a.weight for a in answers], counts),
        )
        return _Batch(answers, not chosen, *(torch.from_numpy(a).to(self.device) for a in arrays))
