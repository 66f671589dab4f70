"""Reward models on the DeepSpeed learner: one optimizer step against a float64 autograd reference
written from the formulas, for any ranks, ZeRO stage and micro-batch size; scores; and the saved
directory in plain transformers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from actors.records import LABELLED
from learner.algorithms import reward_batches
from learner.stages.reward_model import RewardLearner
from reward_service.models.heads import REFERENCE, load_reward_model
from reward_service.models.labelled import of_record
from reward_service.models.meaning import KEY, Meaning, meaning

SETUPS = [
    ("scalar", 1, 0, 10_000),
    ("scalar", 1, 0, 60),
    pytest.param("scalar", 2, 2, 60, marks=pytest.mark.slow),  # ZeRO 3 below splits more
    ("scalar", 2, 3, 80),
    ("implicit", 1, 0, 60),
    ("implicit", 2, 3, 80),
]  # head, ranks, ZeRO stage, padded tokens of a micro-batch
BETA1 = 0.9
BETA = 0.3  # of the implicit reward


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
        rows.append(
            {
                "prompt_id": f"p{i // 2}",
                "prompt_ids": rng.integers(7, 100, 4 + i // 2).tolist(),
                "completion_ids": rng.integers(7, 100, length).tolist(),
                "ends": [*ends, length - 1],
                "labels": [*rng.random(len(ends)).tolist(), float(i % 2 == 0)],
                "pair": i // 2,
                "iteration": 0,
            }
        )
    return pa.RecordBatch.from_pylist(rows, schema=LABELLED)


def settings(ranks: int, zero: int, budget: int, loss: str, *more: str) -> Any:
    from learner.main import load

    return load(
        [
            "+experiment=train_orm",
            f"learner.ranks={ranks}",
            f"learner.zero_stage={zero}",
            "learner.cpus=0",
            f"learner.micro_batch_tokens={max(budget, 112)}",
            "learner.threads=1",
            "optimizer.grad_clip=0",
            f"reward_model.loss={loss}",
            *more,
        ]
    )


@pytest.fixture(scope="module")
def implicit_start(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a head that has moved from its reference, the small model."""
    folder = tmp_path_factory.mktemp("implicit_start")
    module = load_reward_model(str(model_path), trained=False, head="implicit", beta=BETA)
    with torch.no_grad():
        for p in module.model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    setattr(module.model.config, KEY, asdict(Meaning(head="implicit", beta=BETA)))
    module.model.save_pretrained(folder)
    module.save_extra_files(folder)
    return folder


def scalar_logits(folder: Path, rows: list[dict[str, Any]]) -> tuple[Any, list[torch.Tensor]]:
    """(model, logits at the ends of each row), answer by answer in plain transformers, float64."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float64
    )
    at_ends = []
    for r in rows:
        ids = torch.tensor([r["prompt_ids"] + r["completion_ids"]])
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        at_ends.append(model.score(hidden)[[len(r["prompt_ids"]) + e for e in r["ends"]], 0])
    return model, at_ends


def implicit_logits(folder: Path, rows: list[dict[str, Any]]) -> tuple[Any, list[torch.Tensor]]:
    """As `scalar_logits`, of what `implicit_start` and its training saved."""
    model, before = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for _ in range(2)
    )
    before.load_state_dict(load_file(folder / REFERENCE), strict=False)
    at_ends = []
    for r in rows:
        ids = torch.tensor([r["prompt_ids"] + r["completion_ids"]])
        logps = [
            torch.log_softmax(m(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            for m in (model, before)
        ]
        ratios = (logps[0] - logps[1].detach())[len(r["prompt_ids"]) - 1 :]
        at_ends.append(torch.stack([BETA * ratios[: e + 1].sum() for e in r["ends"]]))
    return model, at_ends


HEADS = {"scalar": scalar_logits, "implicit": implicit_logits}


def reference(
    start: Path, batch: pa.RecordBatch, loss: str, head: str = "scalar"
) -> tuple[float, dict[str, np.ndarray], list[list[float]]]:
    """(loss, gradient by name, logits at the ends), float64."""
    model, at_ends = HEADS[head](start, batch.to_pylist())
    labels = [torch.tensor(r["labels"], dtype=torch.float64) for r in batch.to_pylist()]
    if loss == "pointwise":
        terms = [
            -(y * torch.log(torch.sigmoid(s)) + (1 - y) * torch.log(1 - torch.sigmoid(s)))
            for s, y in zip(at_ends, labels, strict=True)
        ]
        value = torch.cat(terms).mean()
    else:
        value = torch.stack(
            [torch.log(1 + torch.exp(at_ends[i + 1][-1] - at_ends[i][-1])) for i in range(0, 12, 2)]
        ).mean()
    value.backward()
    grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return value.item(), grads, [s.detach().tolist() for s in at_ends]


def only_last(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = [r | {"ends": r["ends"][-1:], "labels": r["labels"][-1:]} for r in batch.to_pylist()]
    return pa.RecordBatch.from_pylist(rows, schema=LABELLED)


@pytest.mark.parametrize("head, ranks, zero, budget", SETUPS)
def test_one_step_is_that_of_the_formula_however_it_is_split(
    cluster: None,
    start: Path,
    implicit_start: Path,
    batch: pa.RecordBatch,
    tmp_path: Path,
    head: str,
    ranks: int,
    zero: int,
    budget: int,
) -> None:
    begun = implicit_start if head == "implicit" else start
    learner = RewardLearner(
        settings(
            ranks,
            zero,
            budget,
            "pointwise",
            f"reward_model.head={head}",
            f"reward_model.beta={BETA}",
            "learner.logprob_chunk_tokens=10",
        ),
        str(begun),
    )
    learner.group.start()
    try:
        answers = of_record(batch, ray.put(batch))
        wanted, grads, logits = reference(begun, batch, "pointwise", head)
        job = reward_batches.make_job(
            answers, reward_batches.units(answers, "pointwise"), "pointwise", ranks, budget, 0, 0.0
        )
        found = dict(learner.group.score(job))
        for i, row in enumerate(logits):
            assert found[i] == pytest.approx(row, abs=2e-5)
        result = learner.group.update(job)
        assert result["stats"]["loss"].sum == pytest.approx(wanted, abs=1e-5)
        learner.group.save_state(str(tmp_path))
        state = load_file(tmp_path / "policy.safetensors")
        for name, grad in grads.items():
            got = state[f"exp_avg/model.{name}"].double().numpy() / (1 - BETA1)
            assert np.abs(got - grad).max() <= 2e-5 * max(1.0, np.abs(grad).max()), name
    finally:
        learner.group.stop()


@pytest.mark.parametrize("head", ["scalar", "implicit"])
def test_pairs_and_the_saved_directory(
    cluster: None,
    start: Path,
    implicit_start: Path,
    batch: pa.RecordBatch,
    tmp_path: Path,
    head: str,
) -> None:
    """Of the implicit head that is DPO: -log sigma(beta (log-ratio of the better - log-ratio of the
    worse))."""
    from actors.modeling.loading import load_tokenizer

    cfg = settings(
        1,
        0,
        120,
        "pairwise",
        "optimizer.warmup_steps=0",
        "reward_model.steps=15",
        "reward_model.batch=4",
        "reward_model.lr=0.003",
        f"reward_model.head={head}",
        f"reward_model.beta={BETA}",
    )
    begun = implicit_start if head == "implicit" else start
    learner = RewardLearner(cfg, str(begun))
    learner.group.start()
    try:
        answers = of_record(only_last(batch), ray.put(batch))
        wanted, grads, _ = reference(begun, only_last(batch), "pairwise", head)
        job = reward_batches.make_job(
            answers, reward_batches.units(answers, "pairwise"), "pairwise", 1, 120, 0, 0.0
        )
        assert learner.group.update(job)["stats"]["loss"].sum == pytest.approx(wanted, abs=1e-5)
        learner.group.save_state(str(tmp_path))
        state = load_file(tmp_path / "policy.safetensors")
        for name, grad in grads.items():
            got = state[f"exp_avg/model.{name}"].double().numpy() / (1 - BETA1)
            assert np.abs(got - grad).max() <= 2e-5 * max(1.0, np.abs(grad).max()), name
        learner.fit(answers, None, 0)
        assert learner.measure(answers)["accuracy"] == 1.0  # six pairs are learned by heart
        learner.group.save_model(str(tmp_path / "model"), load_tokenizer(cfg.model))
        beta = BETA if head == "implicit" else 0.0
        assert meaning(str(tmp_path / "model"), {}) == Meaning("outcome", False, "", head, beta)
        _, _, logits = reference(tmp_path / "model", only_last(batch), "pairwise", head)
        found = dict(
            learner.group.score(
                reward_batches.make_job(
                    answers, reward_batches.units(answers, "pointwise"), "pointwise", 1, 120
                )
            )
        )
        assert [found[i][0] for i in range(12)] == pytest.approx(
            [row[0] for row in logits], abs=2e-5
        )
    finally:
        learner.group.stop()
