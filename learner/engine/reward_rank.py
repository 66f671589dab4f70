"""One DeepSpeed rank that trains a reward model: LearnerRank with another module and another
loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.records import ragged
from cluster.monitoring.stat import Accumulator, Stat
from learner.algorithms.reward_batches import RewardJob
from learner.engine.rank import LearnerRank
from reward_service.models.meaning import KEY, Meaning

if TYPE_CHECKING:
    from torch import Tensor

    from actors.modeling.packing import PackedBatch, TokenSequence


@dataclass
class LabelledSample:
    """One labelled answer of this rank. `labels`: float64 [K] in [0, 1], one for each read
    position."""

    index: int  # row of the plan, the same on all ranks
    micro_batch: int
    sequence: TokenSequence  # read at the last token of the answer, or of each of its steps
    labels: np.ndarray
    weight: float  # of each label in the loss of the optimizer step


@dataclass
class LabelledBatch:
    """A micro-batch: packed tokens, and labels and weights float64 [M] of the positions read.

    filler: there was no answer, and some of weight 0 stand in.
    """

    packed: PackedBatch
    labels: Tensor
    weights: Tensor
    filler: bool


def settings(cfg: Any, path: str) -> Any:
    """Return the configuration of ranks that train a reward model, made from the run's.

    cfg: conf.schema.Config.
    path: the model that training starts from, a causal LM or a reward model.
    """
    model = dataclasses.replace(cfg.model, path=path, init="pretrained", gguf_file="", tokenizer="")
    return dataclasses.replace(
        cfg,
        model=model,
        optimizer=dataclasses.replace(cfg.optimizer, lr=cfg.reward_model.lr),
        algorithm=dataclasses.replace(cfg.algorithm, critic=False),
    )


class RewardRank(LearnerRank):
    """Ray actor, like LearnerRank, but `update` takes a RewardJob, and there is `score`.

    cfg: what `settings` returns.
    """

    def __repr__(self) -> str:
        return f"reward_learner-{self.rank}"

    def build(self) -> Any:
        """Return the reward model, whose config says how its scores are to be read."""
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
        meaning = Meaning(
            rm.kind,
            rm.loss == "pointwise",
            self.cfg.data.steps if rm.kind == "process" else "",
            rm.head,
            rm.beta if rm.head == "implicit" else 0.0,
        )
        setattr(module.model.config, KEY, dataclasses.asdict(meaning))
        return module

    def update(self, job: RewardJob) -> dict[str, Any]:
        """Make one optimizer step; return what LearnerRank.update does."""
        from learner.algorithms.losses import REWARD_LOSSES
        from learner.engine.accumulation import accumulate

        samples, stats = self.load_answers(job), Accumulator()

        def loss(m: int) -> tuple[Tensor, Mapping[str, Stat], bool]:
            chosen = [s for s in samples if s.micro_batch == m]
            b = labelled_batch(chosen, job.loss, self.device)
            logits = self.read_logits(b.packed)
            value, loss_stats = REWARD_LOSSES[job.loss](logits, b.labels, b.weights)
            return value, loss_stats | self.total_loss(value), b.filler

        finite = accumulate(self.engine, job.micro_batches, loss, stats)
        return {"stats": stats, "steps": [self.step(job.learning_rate, finite)]}

    def score(self, job: RewardJob) -> list[tuple[int, list[float]]]:
        """Return (row of the plan, logits at its read positions) of each answer of this rank."""
        from actors.modeling.packing import run_packed

        samples = self.load_answers(job)
        logits = run_packed(
            self.read_logits,
            [s.sequence for s in samples],
            np.array([s.micro_batch for s in samples], np.int64),
            self.device,
            job.micro_batches,
        )
        return [(s.index, values.tolist()) for s, values in zip(samples, logits, strict=True)]

    def read_logits(self, packed: PackedBatch) -> Tensor:
        """Return the reward model's logits at the read positions, float32 [M]."""
        return self.engine(packed.ids, packed.rows, packed.columns, packed.begins)

    def load_answers(self, job: RewardJob) -> list[LabelledSample]:
        """Fetch the tables that this rank needs, and return its answers in the plan's order."""
        from actors.modeling.packing import TokenSequence

        mine = [(i, r) for i, r in enumerate(job.plan.to_pylist()) if r["rank"] == self.rank]
        needed = sorted({r["table"] for _, r in mine})
        tables = dict(zip(needed, self.fetch([job.tables[t] for t in needed]), strict=True))
        tokens = {
            t: [ragged(b.column(name)) for name in ("prompt_ids", "completion_ids")]
            for t, b in tables.items()
        }
        samples = []
        for i, r in mine:
            prompt, completion = (column[r["row"]] for column in tokens[r["table"]])
            positions = len(prompt) + np.array(r["step_ends"], np.int64)
            samples.append(
                LabelledSample(
                    i,
                    r["micro_batch"],
                    TokenSequence(np.concatenate([prompt, completion]), len(prompt), positions),
                    np.array(r["step_rewards"]),
                    r["weight"],
                )
            )
        return samples


def labelled_batch(samples: Sequence[LabelledSample], loss: str, device: Any) -> LabelledBatch:
    """Return the micro-batch of some answers.

    If there are none, it holds fillers of weight 0 (two for the pairwise loss), because every
    forward and backward pass is a collective under ZeRO.
    """
    import torch

    from actors.modeling.packing import FILLER, PackedBatch

    filler = LabelledSample(-1, 0, FILLER, np.zeros(1), 0.0)
    members = samples or [filler] * (2 if loss == "pairwise" else 1)
    packed = PackedBatch.of([s.sequence for s in members], device)
    labels = np.concatenate([s.labels for s in members])
    weights = np.repeat([s.weight for s in members], packed.counts)
    tensors = (torch.from_numpy(a).to(device) for a in (labels, weights))
    return LabelledBatch(packed, *tensors, not samples)
