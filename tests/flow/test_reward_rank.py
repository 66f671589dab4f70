"""Reward models on the DeepSpeed learner: one optimizer step against a float64 autograd reference written from the
formulas, for any ranks, ZeRO stage and micro-batch size; scores; and the saved directory in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from actors.records import LABELLED
from learner.reward_training import RewardLearner
from reward_service import training
from reward_service.labelled import of_record
from reward_service.meaning import Meaning, meaning
from reward_service.models import load_reward_model

SETUPS = [(1, 0, 10_000), (1, 0, 60), (2, 2, 60), (2, 3, 80)]  # ranks, ZeRO stage, padded tokens of a micro-batch
BETA1 = 0.9


@pytest.fixture(scope="module")
def start(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a head that is not 0, so that the gradient reaches the body."""
    folder = tmp_path_factory.mktemp("reward_start")
    module = load_reward_model(str(model_path), trained=False)
    with torch.no_grad():
        module.model.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    module.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batch() -> pa.RecordBatch:
    """12 answers of unequal lengths in 6 pairs; the first four have labels for several steps."""
    rng = np.random.default_rng(5)
    rows = []
    for i in range(12):
        length = int(rng.integers(2, 25))
        ends = sorted(rng.choice(length - 1, min(length - 1, 2), False).tolist()) if i < 4 else []
        rows.append({"prompt_id": f"p{i // 2}", "prompt_ids": rng.integers(7, 100, 4 + i // 2).tolist(),
                     "completion_ids": rng.integers(7, 100, length).tolist(), "ends": [*ends, length - 1],
                     "labels": [*rng.random(len(ends)).tolist(), float(i % 2 == 0)], "pair": i // 2, "iteration": 0})
    return pa.RecordBatch.from_pylist(rows, schema=LABELLED)


def settings(ranks: int, zero: int, budget: int, loss: str, *more: str) -> Any:
    from learner.main import load

    return load(["+experiment=train_orm", f"learner.ranks={ranks}", f"learner.zero_stage={zero}", "learner.cpus=0",
                 f"learner.micro_batch_tokens={max(budget, 112)}", "learner.threads=1", "optimizer.grad_clip=0",
                 f"reward_model.loss={loss}", *more])


def reference(start: Path, batch: pa.RecordBatch, loss: str) -> tuple[float, dict[str, np.ndarray], list[list[float]]]:
    """(loss, gradient by name, logits at the ends), answer by answer, float64."""
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, dtype=torch.float64)
    at_ends = []
    for r in batch.to_pylist():
        ids = torch.tensor([r["prompt_ids"] + r["completion_ids"]])
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        at_ends.append(model.score(hidden)[[len(r["prompt_ids"]) + e for e in r["ends"]], 0])
    labels = [torch.tensor(r["labels"], dtype=torch.float64) for r in batch.to_pylist()]
    if loss == "pointwise":
        terms = [-(y * torch.log(torch.sigmoid(s)) + (1 - y) * torch.log(1 - torch.sigmoid(s)))
                 for s, y in zip(at_ends, labels, strict=True)]
        value = torch.cat(terms).mean()
    else:
        value = torch.stack([torch.log(1 + torch.exp(at_ends[i + 1][-1] - at_ends[i][-1]))
                             for i in range(0, 12, 2)]).mean()
    value.backward()
    grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return value.item(), grads, [s.detach().tolist() for s in at_ends]


def only_last(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = [r | {"ends": r["ends"][-1:], "labels": r["labels"][-1:]} for r in batch.to_pylist()]
    return pa.RecordBatch.from_pylist(rows, schema=LABELLED)


@pytest.mark.parametrize("ranks, zero, budget", SETUPS)
def test_one_step_is_that_of_the_formula_however_it_is_split(
        cluster: None, start: Path, batch: pa.RecordBatch, tmp_path: Path, ranks: int, zero: int, budget: int) -> None:
    learner = RewardLearner(settings(ranks, zero, budget, "pointwise"), str(start))
    learner.group.start()
    try:
        answers = of_record(batch, ray.put(batch))
        wanted, grads, logits = reference(start, batch, "pointwise")
        job = training.make_job(answers, training.units(answers, "pointwise"), "pointwise", ranks, budget, 0, 0.0)
        found = dict(learner.group.score(job))
        for i, row in enumerate(logits):
            assert found[i] == pytest.approx(row, abs=2e-5)
        result = learner.group.update(job)
        assert result["stats"]["loss"][0] == pytest.approx(wanted, abs=1e-5)
        learner.group.save_state(str(tmp_path))
        state = load_file(tmp_path / "policy.safetensors")
        for name, grad in grads.items():
            got = state[f"exp_avg/model.{name}"].double().numpy() / (1 - BETA1)
            assert np.abs(got - grad).max() <= 2e-5 * max(1.0, np.abs(grad).max()), name
    finally:
        learner.group.stop()


def test_pairs_and_the_saved_directory(cluster: None, start: Path, batch: pa.RecordBatch, tmp_path: Path) -> None:
    from learner.model import load_tokenizer

    cfg = settings(1, 0, 120, "pairwise", "optimizer.warmup_steps=0", "reward_model.steps=15", "reward_model.batch=4",
                   "reward_model.lr=0.003")
    learner = RewardLearner(cfg, str(start))
    learner.group.start()
    try:
        answers = of_record(only_last(batch), ray.put(batch))
        wanted, grads, _ = reference(start, only_last(batch), "pairwise")
        job = training.make_job(answers, training.units(answers, "pairwise"), "pairwise", 1, 120, 0, 0.0)
        assert learner.group.update(job)["stats"]["loss"][0] == pytest.approx(wanted, abs=1e-5)
        learner.group.save_state(str(tmp_path))
        state = load_file(tmp_path / "policy.safetensors")
        for name, grad in grads.items():
            got = state[f"exp_avg/model.{name}"].double().numpy() / (1 - BETA1)
            assert np.abs(got - grad).max() <= 2e-5 * max(1.0, np.abs(grad).max()), name
        learner.fit(answers, None, 0)
        assert learner.measure(answers)["accuracy"] == 1.0  # six pairs are learned by heart
        learner.group.save_model(str(tmp_path / "model"), load_tokenizer(cfg.model))
        assert meaning(str(tmp_path / "model"), {}) == Meaning("outcome", False, "")
        _, _, logits = reference(tmp_path / "model", only_last(batch), "pairwise")
        found = dict(learner.group.score(training.make_job(answers, training.units(answers, "pointwise"), "pointwise",
                                                           1, 120)))
        assert [found[i][0] for i in range(12)] == pytest.approx([row[0] for row in logits], abs=2e-5)
    finally:
        learner.group.stop()
