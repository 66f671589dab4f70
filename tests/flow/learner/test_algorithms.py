"""Every `algorithm=NAME` runs end to end on the embedded model for three steps, with every engine
real.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(f.stem for f in (ROOT / "conf" / "algorithm").glob("*.yaml"))
STEPS, PROMPTS, SIZE = 3, 4, 4
# cosine_length gives rewards that differ inside a group even while every answer is wrong.
SMALL = [
    f"steps={STEPS}",
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.group_size={SIZE}",
    "rollout.max_tokens=72",
    "reward=tiny",
    "+reward.rules.cosine_length=0.5",
    "reward.workers=1",
    "data.template=short",
    "data.max_prompt_tokens=40",
    "data.heldout_size=2",
    "evaluation.samples=2",
    "optimizer.lr=1e-3",
    "generator.threads=1",
    "learner.threads=1",
    "checkpoint.every=0",
    "cluster=local",
    "cluster.dashboard=false",
    "logging.wandb=disabled",
    "logging.ray_metrics=false",
    "logging.report=false",
    "logging.progress=plain",
]
GIVEN = ("sft", "dpo")  # learn from answers that are given, which the test reads back
DEADLINE_S = 60 + 40 * len(NAMES)

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@dataclass(frozen=True)
class Run:
    folder: Path
    status: int | None
    output: str

    @cached_property
    def cfg(self) -> dict[str, Any]:
        return yaml.safe_load((self.folder / "config.yaml").read_text())

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()[1:]
        return [row for row in map(json.loads, lines) if "groups/trained" in row]

    def __getitem__(self, metric: str) -> list[float]:
        """The metric's value at each step that has it."""
        return [row[metric] for row in self.rows if metric in row]

    def answers(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.folder / "rollouts" / f"step_{step:05d}.parquet").to_pylist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process runs them all, one after the other."""
    where = tmp_path_factory.mktemp("algorithms")
    jobs = [
        f"{name}={json.dumps([f'algorithm={name}', *SMALL, f'logging.rollouts={rollouts}'])}"
        for name in NAMES
        for rollouts in [-1 if name in GIVEN else 0]
    ]
    with (where / "output").open("w") as out:
        subprocess.run(
            [sys.executable, "-m", "tests.flow.many_runs", str(where), *jobs],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
    return where


@pytest.fixture(params=NAMES)
def done(folder: Path, request: pytest.FixtureRequest) -> Run:
    status = (
        json.loads((folder / "status.json").read_text())
        if (folder / "status.json").exists()
        else {}
    )
    found = Run(folder / request.param, status.get(request.param), (folder / "output").read_text())
    assert found.status == 0, found.output[-4000:]
    return found


def test_three_steps_end_to_end(done: Run) -> None:
    algorithm, summary = (
        done.cfg["algorithm"],
        json.loads((done.folder / "summary.json").read_text()),
    )
    assert [row["step"] for row in done.rows] == [1, 2, 3]
    assert len(done["actor/loss"]) == STEPS and all(math.isfinite(x) for x in done["actor/loss"])
    assert (
        all(math.isfinite(x) for x in done["actor/grad_norm"]) and max(done["actor/grad_norm"]) > 0
    )
    assert done["actor/skipped_steps"] == [0, 0, 0]
    assert max(done["training/rollout_logprob_diff/max"], default=0.0) < 1e-4
    groups = summary["groups"]
    assert (
        groups["admitted"]
        == groups["trained"] + groups["filtered"] + groups["in_flight"] + groups["queued"]
    )
    assert (
        groups["trained"] + groups["filtered"] >= STEPS * PROMPTS
        and groups["in_flight"] == groups["queued"] == 0
    )
    # The reference is there exactly where a KL term needs it, and the policy leaves it step by
    # step.
    kl = done["actor/kl_loss"]
    assert len(kl) == (STEPS if algorithm["beta"] > 0 else 0)
    if kl:
        assert abs(kl[0]) < 1e-6 < min(kl[1:])
    # Generators follow the policy, but for RFT, whose samples are those of the model it began with.
    assert done["training/policy_version"] == (
        [0, 0, 0] if algorithm["data"] == "sft_samples" else [1, 2, 3]
    )
    moved = distance(done)
    assert 0 < moved < 0.1


def distance(done: Run) -> float:
    """Largest change of a weight of the saved model against the model that the run began with."""
    after = load_file(done.folder / "model" / "model.safetensors")
    before = load_file(Path(done.cfg["model"]["path"]) / "model.safetensors")
    assert set(after) == set(before)
    return max(float((after[n] - before[n]).abs().max()) for n in before)


@pytest.mark.parametrize("done", ["ppo"], indirect=True)
def test_critic_learns_beside_the_policy(done: Run) -> None:
    values, explained = done["critic/values/max"], done["critic/vf_explained_var"]
    assert values[0] == 0 and done["critic/values/min"][0] == 0  # its head starts at 0
    assert values[2] != 0
    assert len(explained) == STEPS and all(math.isfinite(x) and x <= 1 for x in explained)
    assert len(done["critic/vf_loss"]) == STEPS and min(done["critic/vf_loss"]) > 0


def logprobs(done: Run, model: Any, tokenizer: Any, row: dict[str, Any]) -> torch.Tensor:
    """Log-probs of an answer's tokens, end of text included, by a plain forward pass of the initial
    model.
    """
    prompt = tokenizer(row["prompt"])["input_ids"]
    prompt = prompt[:-1] if prompt[-1] == tokenizer.eos_token_id else prompt
    answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    answer += [tokenizer.eos_token_id] * (row["finish_reason"] == "stop")
    assert len(answer) == row["length"]
    with torch.no_grad():
        table = torch.log_softmax(
            model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1], -1
        )
    return table.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("done", GIVEN, indirect=True)
def test_first_loss_is_that_of_the_given_answers(done: Run) -> None:
    """SFT: mean negative log-likelihood of a token. DPO: policy is reference, so each pair pulls
    with beta / 2.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = done.cfg["model"]["path"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = done.answers(1)
    found = [logprobs(done, model, tokenizer, row) for row in rows]
    if done.folder.name == "sft":
        assert len(rows) == PROMPTS
        wanted = -float(torch.cat(found).mean())
    else:
        assert [row["reward"] for row in rows] == [1.0, 0.0] * PROMPTS
        gaps = [float(found[i].sum() - found[i + 1].sum()) for i in range(0, 2 * PROMPTS, 2)]
        wanted = -done.cfg["algorithm"]["beta"] / 2 * sum(gaps) / PROMPTS
    assert done["actor/loss"][0] == pytest.approx(wanted, rel=1e-4)
