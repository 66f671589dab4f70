"""Each experiment with reward models, with every engine real and everything small: an outcome model
from the policy's samples, then RL on it with refreshes; a process model from labelled steps, then
process supervision by it; what they leave, and that a checkpoint holds the reward model too. The
first is started as a user does, the others in one go.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.data import corpus
from actors.data.prompt import stable_rng
from actors.records import LABELLED, check_labelled
from tests.flow.runs import MARK, ROOT, RUN_S, Run, Starter

QUIET = [
    "logging.wandb=disabled",
    "logging.report=false",
    "cluster=local",
    "cluster.dashboard=false",
    "generator.threads=1",
    "learner.threads=1",
    "data.heldout_size=6",
]
SMALL = [
    "steps=3",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "evaluation.samples=16",
    "evaluation.every=0",
]
TRAIN = ["reward_model.steps=4", "reward_model.batch=16"]

LIMIT_S = 60 + 2 * RUN_S

pytestmark = pytest.mark.timeout(LIMIT_S + RUN_S)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("rewards"), "tiny", QUIET)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def orm(start: Starter) -> Run:
    run = start(
        "orm", "+experiment=train_orm", *TRAIN, "reward_model.prompts=12", "rollout.group_size=4"
    )
    assert run.wait() == 0, run.output
    return run


def test_an_outcome_model_is_trained_on_the_policys_samples(orm: Run) -> None:
    summary = orm.summary()
    assert summary["answers"] == 48 and summary["heldout_answers"] == 24
    assert summary["before"]["auc"] == 0.5 and summary["before"]["loss"] == pytest.approx(
        np.log(2), abs=1e-6
    )
    assert summary["after"]["loss"] < summary["before"]["loss"]
    told = json.loads((orm.folder / "model" / "config.json").read_text())
    assert told["architectures"] == ["LlamaForSequenceClassification"]
    assert told["volley_reward"] == {
        "kind": "outcome",
        "probability": True,
        "steps": "",
        "head": "scalar",
        "beta": 0.0,
    }
    answers = pq.read_table(orm.folder / "answers" / "train.parquet")
    assert check_labelled(answers.combine_chunks().to_batches()[0]).num_rows == 48
    assert sorted(orm.metrics("reward_model/loss")) == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def runs(orm: Run, start: Starter) -> dict[str, Run]:
    """All that follows, in one process with one Ray and one vLLM (many_runs.py)."""
    folder, file = start.folder / "runs", start.folder / "steps.jsonl"
    folder.mkdir()
    labelled_steps(file)
    answers, models = orm.folder / "answers", {n: folder / n / "model" for n in ("prm", "implicit")}
    small = [a for a in SMALL if not a.startswith("steps=")]
    given = {  # the first needs the most places, and Ray is made for it
        "iterative": [
            "+experiment=deepseekmath_iterative",
            *SMALL,
            *TRAIN,
            "reward_model.prompts=8",
            "reward_model.every=1",
            "reward_model.initial=false",
            "logging.rollouts=-1",
            f"reward.models.orm.path={orm.folder / 'model'}",
        ],
        "prm": ["+experiment=train_prm", *TRAIN, f"reward_model.path={file}"],
        "implicit": [
            "+experiment=train_implicit",
            *TRAIN,
            "reward_model.source=files",
            f"reward_model.path={answers / 'train.parquet'}",
            f"reward_model.heldout_path={answers / 'heldout.parquet'}",
        ],
        "supervised": [
            "+experiment=process_supervision",
            "algorithm=grpo_process",
            *SMALL,
            "logging.rollouts=-1",
            f"reward.models.prm.path={models['prm']}",
        ],
        "best": [
            "+experiment=best_of_n",
            f"reward.models.orm.path={orm.folder / 'model'}",
            f"reward.models.prm.path={models['prm']}",
            f"+reward.models.implicit.path={models['implicit']}",
            "+reward.rules.implicit=0",
            "evaluation.samples=32",
        ],
        "hacking": [
            "+experiment=reward_hacking",
            "reward_model.every=1",
            "steps=2",
            *small,
            *TRAIN,
            "reward_model.prompts=8",
            f"reward.models.orm.path={models['implicit']}",
            "reward_model.head=implicit",
            "reward_model.lr=0.001",
        ],
    }
    jobs = [f"{name}={json.dumps([*QUIET, 'model=tiny', *args])}" for name, args in given.items()]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VOLLEY_"))}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.flow.many_runs", str(folder), *jobs],
            cwd=ROOT,
            env=env | {MARK: str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    start.runs += [Run(folder / name, process, folder / "log", str(folder)) for name in given]
    process.wait(timeout=LIMIT_S - 60)
    return {run.folder.name: run for run in start.runs if run.folder.parent == folder}


def done(runs: dict[str, Run], name: str) -> Run:
    status = json.loads((runs[name].folder.parent / "status.json").read_text())
    assert status.get(name) == 0, runs[name].output[-4000:]
    return runs[name]


def test_a_model_without_a_head_is_trained_the_same_way(orm: Run, runs: dict[str, Run]) -> None:
    implicit = done(runs, "implicit")
    summary = implicit.summary()
    assert summary["before"] == orm.summary()["before"] and summary["heldout_answers"] == 24
    assert summary["after"]["loss"] < summary["before"]["loss"]
    told = json.loads((implicit.folder / "model" / "config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLM"]
    assert told["volley_reward"] == {
        "kind": "outcome",
        "probability": True,
        "steps": "",
        "head": "implicit",
        "beta": 0.2,
    }


def by_hand(folder: Path, rows: list[dict[str, Any]]) -> np.ndarray:
    """Probabilities at the last token of each row of a run's rollouts, by plain transformers, one
    at a time.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for r in rows:
        end = [tokenizer.eos_token_id] * (r["finish_reason"] == "stop")
        ids = tokenizer(r["prompt"] + r["completion"], add_special_tokens=False)["input_ids"] + end
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            found.append(torch.sigmoid(model.score(hidden)).item())
    return np.array(found)


def test_iterative_rl_refreshes_the_model_and_its_checkpoint_holds_it(runs: dict[str, Run]) -> None:
    run = done(runs, "iterative")
    assert run.metrics("reward_model/iteration") == {1: 1.0, 2: 2.0}  # none after the last step
    assert run.metrics("reward_model/older_answers") == {1: 0.0, 2: 32.0}
    given = run.rollouts()[
        2
    ].to_pylist()  # step 3 is rewarded by the second refresh, and not as by the first
    scores = {k: by_hand(run.folder / "reward_model" / k, given) for k in ("001", "002")}
    rewards = np.array([r["reward"] for r in given])
    assert np.abs(rewards - scores["002"]).max() < 1e-4 < np.abs(rewards - scores["001"]).max()
    for name in ("reward_gap/orm", "reward_part/orm", "reward/accuracy"):
        assert set(run.metrics(name)) == {1, 2, 3}, name
    assert "best@16/orm" in run.summary()["after"]
    newest = run.folder / "checkpoints" / "step_00003"
    for name in ("model.safetensors", "config.json"):
        assert (newest / f"reward_model.{name}").read_bytes() == (
            run.folder / "reward_model" / "002" / name
        ).read_bytes()
    for number, iteration in ((1, 1), (2, 2)):
        table = pq.read_table(newest / f"answers_{number:03d}.parquet", schema=LABELLED)
        assert set(table.column("iteration").to_pylist()) == {iteration} and table.num_rows == 32


def labelled_steps(file: Path, n: int = 60) -> None:
    """Worked sums with a label a step, some of them wrong from some step on."""
    with file.open("w") as out:
        for i in range(n):
            rng = random.Random(i)
            numbers = [rng.randint(10, 99) for _ in range(3)]
            text, total = corpus.running_sum(stable_rng("steps", i), numbers, slip=0.2)
            steps = [s + "=" for s in text.split("=")[:-1]]
            good = corpus.running_sum(stable_rng("steps", i), numbers, slip=0.0)[0]
            labels = [
                good.startswith("=".join(text.split("=")[: k + 2])) for k in range(len(steps))
            ]
            out.write(
                json.dumps(
                    {
                        "prompt": f"User: {'+'.join(map(str, numbers))}=?\nAssistant: ",
                        "completions": [
                            f"<think>{steps[0]}",
                            *steps[1:],
                            f"{total}</think><answer>{total}</answer>",
                        ],
                        "labels": [*labels, total == sum(numbers)],
                    }
                )
                + "\n"
            )


def test_a_process_model_from_files_supervises_the_steps(runs: dict[str, Run]) -> None:
    summary = done(runs, "prm").summary()
    assert summary["answers"] + summary["heldout_answers"] == 60
    assert summary["heldout_ends"] > 3 * summary["heldout_answers"]
    rl = done(runs, "supervised")
    rewards: dict[int, float] = rl.metrics("reward/mean")
    parts: Any = rl.metrics("reward_part/prm")
    assert rewards == pytest.approx(parts) and set(rewards) == {1, 2, 3}  # the model alone counts
    assert all(0 <= v <= 1 for v in parts.values())
    assert "weighted_maj@16/prm" in rl.summary()["after"]


def test_the_models_choose_among_the_same_samples(runs: dict[str, Run]) -> None:
    run = done(runs, "best")
    found = run.summary()["before"]
    for name in (
        "maj@16",
        *(
            f"{how}@16/{model}"
            for how in ("best", "weighted_maj")
            for model in ("orm", "prm", "implicit")
        ),
    ):
        assert found[name] * 6 * 2 == pytest.approx(round(found[name] * 6 * 2)), (
            name
        )  # two sixteens of six prompts
    assert run.summary()["before"] == run.summary()["after"]  # nothing was trained


def test_reward_hacking_rewards_by_the_model_alone_and_refreshes_it(runs: dict[str, Run]) -> None:
    run = done(runs, "hacking")
    assert run.metrics("reward_model/iteration") == {1: 1.0}
    begun, refreshed = runs["implicit"].folder / "model", run.folder / "reward_model" / "001"
    assert (begun / "reference.safetensors").read_bytes() == (
        refreshed / "reference.safetensors"
    ).read_bytes()
    assert (begun / "model.safetensors").read_bytes() != (
        refreshed / "model.safetensors"
    ).read_bytes()
    assert run.metrics("reward/mean") == pytest.approx(run.metrics("reward_part/orm"))
    gap, gold = run.metrics("reward_gap/orm"), run.metrics("reward/accuracy")
    assert gap == pytest.approx({k: v - gold[k] for k, v in run.metrics("reward/mean").items()})
