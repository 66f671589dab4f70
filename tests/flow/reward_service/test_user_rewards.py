"""A verl Parquet file and reward functions in verl's and TRL's shapes run unchanged through the
command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[3]
# Only what verl and TRL themselves pass; every call leaves a line, for the test to read.
VERL = """
import json
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([data_source, solution_str, ground_truth, extra_info]) + "\\n")
    return {{"score": 0.25 * (len(solution_str) % 5), "acc": float(ground_truth in solution_str)}}
"""
TRL = """
import json
async def spread(prompts, completions, ground_truth, **columns):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([prompts, completions, ground_truth, sorted(columns)]) + "\\n")
    return [float(len(set(completion))) for completion in completions]
"""


def verl_rows(count: int) -> list[dict]:
    return [
        {
            "data_source": "lab/sums",
            "prompt": [{"role": "user", "content": f"{n}+{n}=?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {"index": n, "split": "train"},
        }
        for n in range(1, count + 1)
    ]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(verl_rows(12)), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def train(parquet: Path, run_dir: Path, *more: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "learner.main",
        "model=tiny_random",
        f"data={parquet}",
        "data.template=short",
        "data.heldout_size=2",
        "data.max_prompt_tokens=40",
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
        "rollout.max_tokens=16",
        "steps=1",
        "evaluation.samples=2",
        "logging.wandb=disabled",
        "logging.ray_metrics=false",
        "cluster.dashboard=false",
        "cluster.address=local",
        f"run_dir={run_dir}",
        "logging.rollouts=-1",
        *more,
    ]
    run = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run_dir


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)
def test_verl_parquet_and_both_function_shapes_train(parquet: Path, tmp_path: Path) -> None:
    calls = {name: tmp_path / f"{name}.calls" for name in ("verl", "trl")}
    for name, source in (("verl", VERL), ("trl", TRL)):
        (tmp_path / f"{name}_reward.py").write_text(source.format(calls=str(calls[name])))
    run_dir = train(
        parquet,
        tmp_path / "run",
        "reward=custom",
        f"reward.options.custom.mine.path={tmp_path}/verl_reward.py",
        f"+reward.options.custom.spread={{style: trl, path: {tmp_path}/trl_reward.py}}",
        "+reward.rules.spread=0.1",
    )
    seen = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, path in calls.items()
    }
    assert len(seen["verl"]) == len(seen["trl"]) >= 16  # 4 groups of 4, and the evaluations
    for source, text, truth, extra in seen["verl"]:
        assert source == "lab/sums" and isinstance(text, str) and truth == str(2 * extra["index"])
    for prompts, completions, truth, columns in seen["trl"]:
        assert len(prompts) == len(completions) == len(truth) == 1 and "index" in columns
    by_text = {
        text: 0.25 * (len(text) % 5) + 0.1 * len(set(text)) for _, text, _, _ in seen["verl"]
    }
    files = sorted((run_dir / "rollouts").rglob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert rows and all(row["status"] == "ok" for row in rows)
    for row in rows:
        assert any(abs(row["reward"] - value) < 1e-9 for value in by_text.values()), row
    assert metrics(run_dir)
