"""Every algorithm on the DeepSpeed learner: the gradient is that of its paper's coefficient,
however work is split.

The unified view of DeepSeekMath (2402.03300, section 5.2) as a test: a gradient is the sum over
tokens of weight times coefficient times grad log pi. `coefficients` writes both by name from the
formulas, one answer and one token at a time in float64, and shares no code with the project. Policy
and old policy are one here, so no clip binds; what clipping does is in
tests/unit/learner/test_losses.py and in test_learner.py's two optimizer steps.
"""

from __future__ import annotations

import copy
import math
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
from tests.flow.engines import WAIT_S, SwitchableRank, hf_logprobs, perturbed

NAMES = sorted(f.stem for f in (Path(__file__).parents[3] / "conf" / "algorithm").glob("*.yaml"))
BUDGETS = (40, 130, 10_000)  # padded tokens of a micro-batch
MAX_TOKENS, BETA, LAM = 30, 0.5, 0.95  # BETA: large enough that a KL term shows
REWARDS = [
    1.0,
    0.0,
    0.2,
    0.0,
    0.2,
    0.2,
    0.2,
    0.2,
    0.0,
    0.0,
    1.2,
    0.0,
    1.2,
    0.2,
    0.0,
    1.0,
]  # the second four are equal
TIMED_OUT = 14  # this answer has no reward


def configuration(name: str, model_path: Path, ranks: int = 1, budget: int = 10_000) -> Config:
    from learner.main import load

    cfg = load(
        [
            f"algorithm={name}",
            f"model={model_path}",
            "reward=tiny",
            "rollout.prompts_per_step=4",
            "rollout.group_size=4",
            f"rollout.max_tokens={MAX_TOKENS}",
            "data.max_prompt_tokens=10",
            f"learner.ranks={ranks}",
            "learner.cpus=0",
            "learner.threads=1",
            f"learner.micro_batch_tokens={budget}",
            "learner.logprob_chunk_tokens=16",
            "optimizer.grad_clip=0",
        ]
    )
    return replace(cfg, algorithm=replace(cfg.algorithm, beta=BETA if cfg.algorithm.beta else 0.0))


class Batch:
    """16 answers of 1 to 29 tokens in groups of `size`, as tables, metas and scores, and flat by
    sample.
    """

    def __init__(self, model: Any, size: int) -> None:
        rng, other = np.random.default_rng(3), perturbed(model, 1, 0.02)
        self.size = size
        self.prompts = [rng.integers(7, 100, 5 + i // 4).tolist() for i in range(0, 16, 4)]
        lengths = [
            *rng.integers(1, 30, 4),
            *rng.integers(1, 24, 4),
            *rng.integers(1, 30, 6),
            29,
            27,
        ]
        self.answers = [rng.integers(7, 100, n).tolist() for n in lengths]
        self.groups = [i // size for i in range(16)]
        self.valid = [size == 2 or i != TIMED_OUT for i in range(16)]
        self.rewards = [(1.0, 0.0)[i % 2] for i in range(16)] if size == 2 else REWARDS
        self.ends = [
            sorted(rng.choice(len(a), min(len(a), i % 4), False).tolist())
            for i, a in enumerate(self.answers)
        ]
        self.steps = [rng.integers(0, 2, len(e)).astype(float).tolist() for e in self.ends]
        self.reference = [
            hf_logprobs(other, self.prompts[i // 4] + a)[len(self.prompts[i // 4]) - 1 :]
            for i, a in enumerate(self.answers)
        ]
        self.records()

    def records(self) -> None:
        parts = [range(g * self.size, (g + 1) * self.size) for g in range(16 // self.size)]
        lengths = [len(a) for a in self.answers]
        self.tables = [
            pa.RecordBatch.from_pydict(
                {
                    "group_id": [g] * self.size,
                    "prompt_id": [f"p{g}"] * self.size,
                    "sample_index": list(range(self.size)),
                    "prompt_ids": [self.prompts[i // 4] for i in part],
                    "completion_ids": [self.answers[i] for i in part],
                    "behaviour_logprobs": [self.reference[i] for i in part],
                    "versions": [[0] * lengths[i] for i in part],
                    "finish_reason": ["stop"] * self.size,
                },
                schema=ROLLOUT,
            )
            for g, part in enumerate(parts)
        ]
        self.references = [
            pa.RecordBatch.from_pydict(
                {
                    "group_id": [g] * self.size,
                    "sample_index": list(range(self.size)),
                    "ref_logprobs": [self.reference[i] for i in part],
                },
                schema=REFERENCE,
            )
            for g, part in enumerate(parts)
        ]
        self.metas = [
            GroupMeta(
                g,
                f"p{g}",
                len(self.prompts[part[0] // 4]),
                np.array([lengths[i] for i in part]),
                ("stop",) * self.size,
                0,
                0,
            )
            for g, part in enumerate(parts)
        ]
        values = np.where(self.valid, self.rewards, np.nan)
        blank = [""] * 16
        self.scores = Scores(
            values,
            values,
            values,
            np.array(self.valid),
            ["ok" if v else "timeout" for v in self.valid],
            blank,
            [{} for _ in blank],
            blank,
            self.steps,
            self.ends,
        )

    def job(self, cfg: Config) -> UpdateJob:
        found = assemble(cfg, self.metas, self.scores)
        references = [ray.put(r) for r in self.references] if cfg.algorithm.beta else None
        return UpdateJob(
            0,
            [ray.put(t) for t in self.tables],
            references,
            found.plan,
            found.micro_batches,
            (0.1,),
            1.0,
        )


# ---- the reference -------------------------------------------------------------------------------


def normalised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / x.std() if x.std() > 1e-9 else 0 * x


def outcome(name: str, r: np.ndarray) -> np.ndarray:
    """Advantages of one group from its rewards."""
    if name in ("grpo", "gspo", "cispo", "dapo"):
        return normalised(r)
    if name in ("dr_grpo", "reinforce_pp_baseline"):
        return r - r.mean()
    return np.array([x - (r.sum() - x) / (len(r) - 1) for x in r])  # rloo


def to_go(x: np.ndarray, factor: float = 1.0) -> np.ndarray:
    return np.array([sum(factor**k * v for k, v in enumerate(x[t:])) for t in range(len(x))])


def over_all_tokens(parts: list[np.ndarray]) -> list[np.ndarray]:
    whole = np.concatenate(parts)
    return [(p - whole.mean()) / whole.std() for p in parts]


def td_errors(b: Batch, d: list[np.ndarray], values: list[np.ndarray], i: int) -> np.ndarray:
    """r_t + V_{t+1} - V_t, with -BETA d_t and at the end the outcome as rewards."""
    rewards = -BETA * d[i]
    rewards[-1] += b.rewards[i]
    return rewards + np.append(values[i][1:], 0.0) - values[i]


def coefficients(
    name: str, b: Batch, d: list[np.ndarray], values: list[np.ndarray]
) -> dict[int, np.ndarray]:
    """Sample -> coefficient of grad log pi at each of its tokens. `d`: log(pi/pi_ref); `values`: of
    the critic.
    """
    use = [i for i in range(16) if b.valid[i]]
    ones = {i: np.ones(len(b.answers[i])) for i in use}
    members = [[i for i in use if b.groups[i] == g] for g in sorted(set(b.groups))]
    if name == "sft":
        return ones
    if name in ("rft", "online_rft"):
        return {i: float(b.rewards[i] >= 1) * ones[i] for i in use}
    if name == "dpo":
        out = {}
        for good, bad in members:
            pull = BETA / (1 + math.exp(BETA * (d[good].sum() - d[bad].sum())))
            out |= {good: pull * ones[good], bad: -pull * ones[bad]}
        return out
    if name == "ppo":
        found = over_all_tokens([to_go(td_errors(b, d, values, i), LAM) for i in use])
        return dict(zip(use, found, strict=True))
    if name == "reinforce_pp":
        found = over_all_tokens([b.rewards[i] - BETA * to_go(d[i]) for i in use])
        return dict(zip(use, found, strict=True))
    if name == "grpo_process":
        return process(b, d, members)
    rewards = {i: b.rewards[i] for i in use}
    if name == "dapo":  # the last fifth of 30 tokens costs up to 1
        rewards = {i: r + min(0.0, (24 - len(b.answers[i])) / 6) for i, r in rewards.items()}
        members = [m for m in members if len({rewards[i] for i in m}) > 1]
    if name == "rloo":
        rewards = {i: r - BETA * d[i].sum() for i, r in rewards.items()}
    out = {}
    for m in members:
        out |= dict(zip(m, outcome(name, np.array([rewards[i] for i in m])), strict=True))
    if name == "reinforce_pp_baseline":
        scale = np.sqrt(np.mean([a**2 for a in out.values()]))
        return {i: a / scale - BETA * d[i] for i, a in out.items()}
    kl = {i: BETA * (np.exp(-d[i]) - 1) if name == "grpo" else 0.0 for i in out}
    return {i: a * ones[i] + kl[i] for i, a in out.items()}


def process(b: Batch, d: list[np.ndarray], members: list[list[int]]) -> dict[int, np.ndarray]:
    """A token's sum of its answer's step rewards that end at or after it, normalised with those of
    its group.
    """
    out = {}
    for m in members:
        normal = normalised(np.array([r for i in m for r in b.steps[i]]))
        for i in m:
            mine, normal = normal[: len(b.steps[i])], normal[len(b.steps[i]) :]
            out[i] = np.array(
                [
                    sum(r for r, end in zip(mine, b.ends[i], strict=True) if end >= t)
                    for t in range(len(b.answers[i]))
                ]
            ) + BETA * (np.exp(-d[i]) - 1)
    return out


def weights(name: str, b: Batch, used: list[int]) -> dict[int, float]:
    """Sample -> weight of each of its tokens."""
    n, tokens = len(used), sum(len(b.answers[i]) for i in used)
    if name in (
        "grpo",
        "grpo_process",
        "gspo",
        "rft",
        "online_rft",
    ):  # mean over tokens, then over answers
        return {i: 1 / (n * len(b.answers[i])) for i in used}
    if name == "dr_grpo":
        return dict.fromkeys(used, 1 / (n * MAX_TOKENS))
    return dict.fromkeys(
        used, 2 / n if name == "dpo" else 1 / tokens
    )  # dpo: one over the number of pairs


def forward(model: Any, b: Batch, i: int, head: np.ndarray | None = None) -> torch.Tensor:
    """float64 [T], differentiable: log-probs of the answer's tokens, or with `head` the value
    before each.
    """
    n, ids = len(b.prompts[i // 4]), torch.tensor([b.prompts[i // 4] + b.answers[i]])
    if head is not None:
        return (
            model.get_decoder()(input_ids=ids).last_hidden_state[0, n - 1 : -1]
            @ torch.from_numpy(head).T
        )[:, 0]
    return torch.log_softmax(model(ids).logits[0, n - 1 : -1], -1).gather(1, ids[0, n:, None])[:, 0]


def reference_gradients(
    model: Any, b: Batch, name: str, head: np.ndarray
) -> list[dict[str, np.ndarray]]:
    """[of the policy, of the critic (PPO)] by parameter name."""
    policy, critic = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    logprobs = [forward(policy, b, i) for i in range(16)]
    seen = [forward(critic, b, i, head.astype(np.float64)) for i in range(16)]
    values = [v.detach().numpy() for v in seen]
    d = [x.detach().numpy() - b.reference[i] for i, x in enumerate(logprobs)]
    found = coefficients(name, b, d, values)
    w = weights(name, b, list(found))
    (-sum(w[i] * (torch.from_numpy(c) * logprobs[i]).sum() for i, c in found.items())).backward()
    if name == "ppo":  # half the squared distance to V + GAE, which nothing differentiates
        targets = {
            i: torch.from_numpy(values[i] + to_go(td_errors(b, d, values, i), LAM)) for i in found
        }
        sum(w[i] * 0.5 * (seen[i] - targets[i]).square().sum() for i in found).backward()
    return [
        {n: p.grad.numpy() for n, p in m.named_parameters() if p.grad is not None}
        for m in (policy, critic)
    ]


# ---- the learner ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batches(model: Any) -> dict[int, Batch]:
    return {size: Batch(model, size) for size in (2, 4)}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"ranks{n}")
def learner(cluster: None, model_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One engine, with a critic, for all algorithms."""
    made = LearnerGroup(configuration("ppo", model_path, request.param), SwitchableRank)
    made.start()
    yield SimpleNamespace(ranks=made.ranks, count=request.param)
    made.stop()


def distance(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    gap = sum(float(((found[n].astype(np.float64) - wanted[n]) ** 2).sum()) for n in wanted)
    return (gap / sum(float((wanted[n] ** 2).sum()) for n in wanted)) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_that_of_the_coefficient_for_every_split(
    learner: Any, batches: dict[int, Batch], model: Any, model_path: Path, name: str
) -> None:
    b = batches[2 if name == "dpo" else 4]
    head = np.random.default_rng(5).normal(0, 0.3, (1, 64)).astype(np.float32)
    wanted = reference_gradients(model, b, name, head)
    counts, away = [], []
    for budget in BUDGETS:
        cfg = configuration(name, model_path, learner.count, budget)
        ray.get([r.use.remote(cfg.algorithm, head) for r in learner.ranks], timeout=WAIT_S)
        work = b.job(cfg)
        counts.append(work.micro_batches[0])
        found = ray.get([r.gradient.remote(work) for r in learner.ranks], timeout=WAIT_S)[0]
        assert set(found) == set(wanted[0])
        away.append(distance(found, wanted[0]))
        if cfg.algorithm.critic:
            found = ray.get(
                [r.critic_gradient.remote(work) for r in learner.ranks], timeout=WAIT_S
            )[0]
            assert set(found) == {
                "head.weight",
                *(n.replace("model.", "decoder.") for n in wanted[1]),
            }
            away.append(
                distance({n.replace("decoder.", "model."): g for n, g in found.items()}, wanted[1])
            )
    assert counts[0] > counts[1] > counts[2] == 1
    print(f"{name}, {learner.count} ranks: {max(away):.2g} from float64; micro-batches {counts}")
    assert max(away) < 1e-5
