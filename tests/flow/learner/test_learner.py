"""The DeepSpeed learner against a plain float64 autograd reference of GRPO, written here from the
formula.

The reference (DeepSeekMath, 2402.03300, eq. 3 and 4) loops over answers and tokens and shares no
code with the learner: no batching, no packing, no padding, no chunks, no ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch

from actors.records import REFERENCE, ROLLOUT, GroupMeta
from conf.schema import Config
from learner.algorithms.assemble import Scores, assemble
from learner.engine.group import LearnerGroup
from learner.engine.job import UpdateJob
from tests.flow.engines import WAIT_S, GradientRank

GROUPS, SIZE, BETA, RATE = 4, 4, 0.04, 0.05
# (ranks, ZeRO stage). On one rank ZeRO has nothing to split, so those setups are slow repeats.
SETUPS = [(1, 0), (2, 0), (2, 2), (2, 3)]
SLOW_SETUPS = [(1, 2), (1, 3)]
BUDGETS = {"small": 40, "medium": 130, "whole": 10_000}  # padded tokens of a micro-batch
OPTIMIZER = {
    "lr": RATE,
    "eps": 0.1,
    "weight_decay": 0.01,
    "grad_clip": 0.25,
}  # eps large: no sign(0) in Adam
REWARDS = [[1.0, 0.0, 0.2, 0.0], [0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 1.2, 0.0], [1.2, 0.2, 0.0, 1.0]]
TIMED_OUT = (3, 2)  # this sample has no reward


def make_config(model_path: Path, ranks: int = 1, zero: int = 0) -> Config:
    from learner.main import load

    return load(
        [
            "experiment=r1_zero",
            f"model={model_path}",
            f"rollout.prompts_per_step={GROUPS}",
            f"rollout.group_size={SIZE}",
            "rollout.max_tokens=30",
            "data.max_prompt_tokens=10",
            f"algorithm.beta={BETA}",
            f"learner.ranks={ranks}",
            f"learner.zero_stage={zero}",
            "learner.cpus=0",
            "learner.threads=1",
            "learner.micro_batch_tokens=10000",
            "learner.logprob_chunk_tokens=16",
            *(f"optimizer.{k}={v}" for k, v in OPTIMIZER.items()),
        ]
    )


@pytest.fixture(scope="module")
def batch(model: Any) -> SimpleNamespace:
    """Random answers of unequal lengths, with reference and behaviour log-probs near the model's
    own."""
    from tests.flow.engines import hf_logprobs, perturbed

    rng = np.random.default_rng(3)
    other = perturbed(model, 1, 0.02)
    tables, references, metas = [], [], []
    for g in range(GROUPS):
        prompt = rng.integers(7, 100, 5 + g).tolist()
        lengths = rng.integers(1, 30, SIZE).tolist()
        answers = [rng.integers(7, 100, n).tolist() for n in lengths]
        near = [hf_logprobs(other, prompt + a)[len(prompt) - 1 :] for a in answers]
        tables.append(
            pa.RecordBatch.from_pydict(
                {
                    "group_id": [g] * SIZE,
                    "prompt_id": [f"p{g}"] * SIZE,
                    "sample_index": list(range(SIZE)),
                    "prompt_ids": [prompt] * SIZE,
                    "completion_ids": answers,
                    "behaviour_logprobs": near,
                    "versions": [[0] * n for n in lengths],
                    "finish_reason": ["length"] * SIZE,
                },
                schema=ROLLOUT,
            )
        )
        references.append(
            pa.RecordBatch.from_pydict(
                {"group_id": [g] * SIZE, "sample_index": list(range(SIZE)), "ref_logprobs": near},
                schema=REFERENCE,
            )
        )
        metas.append(
            GroupMeta(g, f"p{g}", len(prompt), np.array(lengths), ("length",) * SIZE, 0, 0)
        )
    statuses = ["ok"] * (GROUPS * SIZE)
    statuses[TIMED_OUT[0] * SIZE + TIMED_OUT[1]] = "timeout"
    valid = np.array([s == "ok" for s in statuses])
    values = np.where(valid, np.concatenate(REWARDS), np.nan)
    blank, none = [""] * len(statuses), [None] * len(statuses)
    scores = Scores(
        values, values, values, valid, statuses, blank, [{} for _ in blank], blank, none, none
    )
    return SimpleNamespace(tables=tables, references=references, metas=metas, scores=scores)


def job(cfg: Config, batch: SimpleNamespace, budget: int = 10_000, updates: int = 1) -> UpdateJob:
    cfg = replace(
        cfg, learner=replace(cfg.learner, micro_batch_tokens=budget, updates_per_batch=updates)
    )
    found = assemble(cfg, batch.metas, batch.scores)
    return UpdateJob(
        0,
        [ray.put(t) for t in batch.tables],
        [ray.put(r) for r in batch.references],
        found.plan,
        found.micro_batches,
        (RATE,) * len(found.micro_batches),
        1.0,
    )


# ---- the reference -------------------------------------------------------------------------------


def token_logprobs(model: Any, row: dict[str, Any]) -> torch.Tensor:
    n = len(row["prompt_ids"])
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    logits = torch.log_softmax(model(ids).logits[0, n - 1 : -1], -1)
    return logits.gather(1, ids[0, n:, None])[:, 0]


def grpo_loss(
    model: Any, old_model: Any, batch: SimpleNamespace, groups: list[int], eps: float = 0.2
) -> torch.Tensor:
    """1/N sum_i 1/|o_i| sum_t -min(r A, clip(r) A) + beta (pi_ref/pi - log(pi_ref/pi) - 1), answers
    with a reward."""
    terms = []
    for g in groups:
        good = [i for i in range(SIZE) if (g, i) != TIMED_OUT]
        rewards = np.array([REWARDS[g][i] for i in good])
        std = rewards.std()
        advantages = (rewards - rewards.mean()) / std if std > 1e-9 else np.zeros(len(good))
        rows, refs = batch.tables[g].to_pylist(), batch.references[g].to_pylist()
        for i, advantage in zip(good, advantages, strict=True):
            now = token_logprobs(model, rows[i])
            with torch.no_grad():
                old = token_logprobs(old_model, rows[i])
            ratio = torch.exp(now - old)
            surrogate = torch.minimum(
                ratio * advantage, torch.clamp(ratio, 1 - eps, 1 + eps) * advantage
            )
            away = torch.tensor(refs[i]["ref_logprobs"], dtype=torch.float64) - now
            terms.append((-surrogate + BETA * (torch.exp(away) - away - 1)).mean())
    return torch.stack(terms).mean()


@pytest.fixture(scope="module")
def double(model: Any) -> Any:
    return copy.deepcopy(model).double()


@pytest.fixture(scope="module")
def reference_gradient(double: Any, batch: SimpleNamespace) -> dict[str, np.ndarray]:
    policy = copy.deepcopy(double)
    grpo_loss(policy, double, batch, list(range(GROUPS))).backward()
    return {n: p.grad.numpy() for n, p in policy.named_parameters()}


@pytest.fixture(scope="module")
def reference_steps(double: Any, batch: SimpleNamespace) -> dict[str, np.ndarray]:
    """Weights after two optimizer steps on one batch: groups 0 1, then 2 3, both against the policy
    it began with."""
    policy = copy.deepcopy(double)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=RATE,
        eps=OPTIMIZER["eps"],
        betas=(0.9, 0.999),
        weight_decay=OPTIMIZER["weight_decay"],
    )
    for groups in ([0, 1], [2, 3]):
        optimizer.zero_grad()
        grpo_loss(policy, double, batch, groups).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIMIZER["grad_clip"])
        optimizer.step()
    return {n: p.detach().numpy() for n, p in policy.named_parameters()}


# ---- the learner ---------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[*SETUPS, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW_SETUPS)],
    ids=lambda s: f"ranks{s[0]}-zero{s[1]}",
)
def learner(
    cluster: None, model_path: Path, request: pytest.FixtureRequest
) -> Iterator[LearnerGroup]:
    """Started once a setup. Of its tests only the last one changes the weights."""
    group = LearnerGroup(make_config(model_path, *request.param), GradientRank)
    group.start()
    yield group
    group.stop()


def weights(learner: LearnerGroup) -> dict[str, np.ndarray]:
    out = {}
    for bucket in learner.publish(0, [[9, 10, 11]]).buckets:
        buffer = ray.get(bucket.ref, timeout=WAIT_S)
        for e in bucket.entries:
            size = int(np.prod(e.shape)) * 4
            out[e.name] = (
                buffer[e.offset : e.offset + size].view(np.float32).reshape(e.shape).copy()
            )
    return out


def distance(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    assert set(found) == set(wanted)
    gap = sum(float(((found[n].astype(np.float64) - wanted[n]) ** 2).sum()) for n in wanted)
    return (gap / sum(float((wanted[n].astype(np.float64) ** 2).sum()) for n in wanted)) ** 0.5


def test_gradient_is_that_of_the_formula_for_every_split(
    learner: LearnerGroup, batch: SimpleNamespace, reference_gradient: dict[str, np.ndarray]
) -> None:
    before, gradients, counts = weights(learner), {}, []
    for name, budget in BUDGETS.items():
        work = job(learner.cfg, batch, budget)
        counts.append(work.micro_batches[0])
        gradients[name] = ray.get([r.gradient.remote(work) for r in learner.ranks], timeout=WAIT_S)[
            0
        ]
    assert counts[0] > counts[1] > counts[2] == 1
    away = {name: distance(g, reference_gradient) for name, g in gradients.items()}
    between = max(distance(g, gradients["whole"]) for g in gradients.values())
    print(
        f"gradient, relative: from float64 {max(away.values()):.2g}, between budgets "
        f"{between:.2g}; {counts}"
    )
    assert max(away.values()) < 1e-5 and between < 1e-5
    # Not only in the sum: each parameter on its own.
    for name, wanted in reference_gradient.items():
        gap = np.linalg.norm(gradients["small"][name] - wanted) / np.linalg.norm(wanted)
        assert gap < 1e-4, (name, gap)
    after = weights(learner)
    assert all((before[n] == after[n]).all() for n in before)


def test_exact_kl_is_that_of_the_whole_vocabulary(
    learner: LearnerGroup, batch: SimpleNamespace, model: Any, double: Any
) -> None:
    """A diagnostic travels with the job; one completion, however many ranks there are."""
    from learner.engine.diagnostics import ExactKL
    from tests.flow.engines import perturbed

    good = job(learner.cfg, batch, BUDGETS["medium"])
    first = good.plan.slice(0, 1).to_pylist()[0]
    row = batch.tables[first["table"]].to_pylist()[first["row"]]
    n, ids = len(row["prompt_ids"]), torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    tokens = min(5, len(row["completion_ids"]))
    other = perturbed(model, 1, 0.02)
    with torch.no_grad():
        p, q = (
            torch.log_softmax(m(ids).logits[0, n - 1 : n - 1 + tokens], -1) for m in (double, other)
        )
    wanted = [float((a.exp() * (a - b.double())).sum()) for a, b in zip(p, q, strict=True)]
    exact = ExactKL(good.tables[first["table"]], first["row"], ray.put(q.numpy()))
    # Without a learning rate the job makes no optimizer step, so the weights stay.
    result = learner.update(replace(good, learning_rates=(), diagnostics=(exact,)))
    measured = result["stats"]["kl_exact"]
    assert measured.count == tokens
    assert measured.sum == pytest.approx(sum(wanted), abs=1e-5)
    assert (measured.min, measured.max) == pytest.approx((min(wanted), max(wanted)), abs=1e-5)


def test_a_non_finite_step_is_skipped_on_all_ranks(
    learner: LearnerGroup, batch: SimpleNamespace
) -> None:
    """One nan advantage of one sample: counted, and no weight of any rank moves by a bit."""
    before = weights(learner)
    good = job(learner.cfg, batch, BUDGETS["medium"])
    column = good.plan.schema.names.index("advantage")
    for place in (0, 13):  # samples of different ranks and micro-batches
        values = good.plan.column("advantage").to_numpy().copy()
        values[place] = np.nan
        poisoned = replace(
            good,
            plan=good.plan.set_column(column, good.plan.schema.field(column), pa.array(values)),
        )
        results = ray.get([r.update.remote(poisoned) for r in learner.ranks], timeout=WAIT_S)
        assert [r["steps"][0]["skipped"] for r in results] == [1.0] * len(learner.ranks)
        after = weights(learner)
        assert all((before[n] == after[n]).all() for n in before)


def test_two_optimizer_steps_on_one_batch(
    learner: LearnerGroup,
    batch: SimpleNamespace,
    model: Any,
    reference_steps: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    """Whole groups a step, clipped ratios against the policy the batch began with; then the saved
    model is that policy.

    Runs after the poisoned steps, so it also shows that those left no trace in gradients or
    moments."""
    start = {n: p.detach().numpy() for n, p in model.named_parameters()}
    result = learner.update(job(learner.cfg, batch, BUDGETS["medium"], updates=2))
    assert [s["skipped"] for s in result["steps"]] == [0.0, 0.0]
    ratio = result["stats"]["ratio"]
    trained = sum(int(m.lengths.sum()) for m in batch.metas) - int(
        batch.metas[TIMED_OUT[0]].lengths[TIMED_OUT[1]]
    )
    assert ratio.count == trained
    assert (
        ratio.min < 0.8 and ratio.max > 1.2
    )  # the second step left the trust region, so clipping was put to the test
    found = weights(learner)
    moved = {n: found[n] - start[n] for n in start}
    away = distance(moved, {n: reference_steps[n] - start[n] for n in start})
    print(
        f"change of weights after two steps, relative to float64: {away:.2g}; "
        f"ratio {ratio.min:.2f} to {ratio.max:.2f}"
    )
    assert away < 1e-4
    saved_model_is(learner, found, tmp_path)


def saved_model_is(learner: LearnerGroup, found: dict[str, np.ndarray], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actors.modeling.tokenizer import build_tokenizer

    learner.save_model(str(tmp_path / "model"), build_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_safetensors=True)
    for name, p in loaded.named_parameters():
        assert (p.detach().numpy() == found[name]).all(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("<think>1+1").input_ids[0] == 3
    published = learner.publish(1, [[9, 10, 11, 12, 50, 60]]).probe
    from tests.flow.engines import hf_logprobs

    assert np.abs(hf_logprobs(loaded, published.ids[0]) - published.logprobs[0]).max() < 1e-5


# ---- the policy module, in this process ----------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_values_nor_gradients(double: Any, temperature: float) -> None:
    from actors.modeling.policy import Policy

    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(7, 100, (3, 20), generator=rng)
    rows = torch.tensor([0] * 10 + [1] * 3 + [2] * 17)
    columns = torch.cat([torch.arange(8, 18), torch.arange(1, 4), torch.arange(3, 20)])
    outcomes = []
    for chunk in (10**9, 7, 1):
        policy = Policy(copy.deepcopy(double), chunk)
        logprobs, entropy = policy(ids, rows, columns, temperature, True, True)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        outcomes.append((logprobs, entropy, [p.grad for p in policy.parameters()]))
    whole = outcomes[0]
    for logprobs, entropy, grads in outcomes[1:]:
        assert torch.allclose(logprobs, whole[0], atol=1e-6) and torch.allclose(
            entropy, whole[1], atol=1e-6
        )
        gap = (
            sum(float((a - b).square().sum()) for a, b in zip(grads, whole[2], strict=True)) ** 0.5
        )
        assert gap < 1e-5 * sum(float(b.square().sum()) for b in whole[2]) ** 0.5
    with torch.no_grad():
        table = torch.log_softmax(double(ids).logits / temperature, -1)[rows, columns - 1]
    assert torch.allclose(
        whole[0].double(), table.gather(1, ids[rows, columns][:, None])[:, 0], atol=1e-5
    )
    assert torch.allclose(whole[1].double(), -(table.exp() * table).sum(-1), atol=1e-5)


def test_entropy_carries_a_gradient_only_when_asked(double: Any) -> None:
    from actors.modeling.policy import Policy

    ids = torch.arange(10, 20)[None]
    rows, columns = torch.zeros(9, dtype=torch.long), torch.arange(1, 10)
    policy = Policy(double, 4)
    assert not policy(ids, rows, columns, 1.0, True, False)[1].requires_grad
    assert policy(ids, rows, columns, 1.0, True, True)[1].requires_grad
    assert policy(ids, rows, columns)[1] is None


def test_what_follows_a_token_changes_nothing(double: Any) -> None:
    """Right padding needs no mask: any ids behind the last counted token give the same
    log-probs."""
    from actors.modeling.policy import Policy

    policy = Policy(double, 100)
    ids = torch.randint(7, 100, (1, 30), generator=torch.Generator().manual_seed(1))
    rows, columns = torch.zeros(8, dtype=torch.long), torch.arange(4, 12)
    other = ids.clone()
    other[0, 12:] = 0
    with torch.no_grad():
        wanted, _ = policy(ids[:, :12], rows, columns)
        for x in (ids, other):
            assert torch.allclose(policy(x, rows, columns)[0], wanted, atol=1e-6)
