"""The reward-model pool with real actors: groups scored, an actor killed, a model replaced, and one
very long answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from actors.data.prompt import make_prompt
from actors.modeling.tokenizer import save_tokenizer
from actors.records import ROLLOUT, GroupMeta
from actors.rollouts import Group
from conf.schema import ConfigError
from reward_service.models.heads import load_reward_model
from reward_service.models.meaning import NEW
from reward_service.models.pool import RewardModelPool, check_vocabulary

LONG = 10_000  # tokens
MIB = 1 << 20


def make_reward_model(
    folder: Path, seed: int, context: int = 224, hidden: int = 64, layers: int = 2
) -> Path:
    tokenizer = save_tokenizer(folder, context)
    torch.manual_seed(seed)
    LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=context,
            num_labels=1,
            initializer_range=0.2,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(folder)
    return folder


def make_group(number: int, lengths: list[int]) -> Group:
    rng = np.random.default_rng(number)
    n = len(lengths)
    table = pa.RecordBatch.from_pydict(
        {
            "group_id": [number] * n,
            "prompt_id": [f"p{number}"] * n,
            "sample_index": list(range(n)),
            "prompt_ids": [rng.integers(7, 100, 6).tolist()] * n,
            "completion_ids": [rng.integers(7, 100, k).tolist() for k in lengths],
            "behaviour_logprobs": [[-1.0] * k for k in lengths],
            "versions": [[0] * k for k in lengths],
            "finish_reason": ["stop"] * n,
        },
        schema=ROLLOUT,
    )
    prompt = make_prompt(
        template="short", question=f"{number}+1=?", gold="5", data_source="arithmetic", task="math"
    )
    meta = GroupMeta(number, f"p{number}", 6, np.array(lengths), ("stop",) * n, 0, 0)
    return Group(prompt, meta, ray.put(table))


def alone(folder: Path, group: Group) -> list[float]:
    """One answer at a time."""
    model = load_reward_model(str(folder)).eval()
    with torch.no_grad():
        return [
            float(
                model(
                    torch.tensor([r["prompt_ids"] + r["completion_ids"]]),
                    torch.tensor([0]),
                    torch.tensor([len(r["prompt_ids"] + r["completion_ids"]) - 1]),
                    torch.tensor([len(r["prompt_ids"])]),
                )
            )
            for r in ray.get(group.table).to_pylist()
        ]


def settings(model: Path, *more: str) -> Any:
    from learner.main import load

    return load(
        [
            "experiment=r1_zero",
            f"model={model}",
            "reward=orm",
            f"reward.models.orm.path={model}",
            "reward_model.cpus=0",
            "reward_model.batch_tokens=300",
            "data.max_prompt_tokens=24",
            "rollout.max_tokens=100",
            *more,
        ]
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_reward_model(tmp_path_factory.mktemp(f"reward{i}"), i) for i in range(2)]


@pytest.fixture
def pool(cluster: None, folders: list[Path]) -> Iterator[RewardModelPool]:
    made = RewardModelPool(settings(folders[0], "reward_model.count=2"), str(folders[0]))
    made.start()
    yield made
    made.stop()


def scores(pool: RewardModelPool, group: Group) -> list[float]:
    return [v["orm"].score for v in pool.collect(group.meta.group_id)]


def test_groups_are_spread_batched_and_scored_and_a_refresh_reaches_all(
    pool: RewardModelPool, folders: list[Path]
) -> None:
    groups = [make_group(i, [5 + 7 * i, 40, 90]) for i in range(6)]
    for g in groups:
        pool.submit(g)
    assert {work.member for work in pool.unanswered.values()} == {0, 1}
    for g in groups:
        assert scores(pool, g) == pytest.approx(alone(folders[0], g), abs=1e-4)
    assert not pool.unanswered
    pool.load("orm", str(folders[1]))
    for g in groups:
        pool.submit(g)
    for g in groups:
        assert scores(pool, g) == pytest.approx(alone(folders[1], g), abs=1e-4)


def test_a_killed_one_loses_no_answer_and_its_successor_has_the_refreshed_model(
    pool: RewardModelPool, folders: list[Path]
) -> None:
    pool.load("orm", str(folders[1]))
    groups = [make_group(i, [20, 60, 90, 30]) for i in range(12)]
    for index in (0, 1):  # both are at work, or have it before them
        os.kill(pool.members[index].processes[0].pid, signal.SIGSTOP)
    for g in groups:
        pool.submit(g)
    for index in (0, 1):
        os.kill(pool.members[index].processes[0].pid, signal.SIGKILL)
    for g in groups:
        assert scores(pool, g) == pytest.approx(alone(folders[1], g), abs=1e-4)
    assert pool.restarts == 2 and not pool.unanswered


def test_one_of_10000_tokens_among_short_ones_takes_no_more_memory_than_itself(
    cluster: None, tmp_path: Path
) -> None:
    """Padded to the longest, 64 answers would need 64 x 10,000 x 1,024 values (2.4 GiB) for the MLP
    of one layer."""
    folder = make_reward_model(tmp_path, 3, context=16_384, hidden=256)
    cfg = settings(
        folder,
        f"rollout.max_tokens={LONG}",
        "learner.micro_batch_tokens=20000",
        "reward_model.batch_tokens=4096",
    )
    pool = RewardModelPool(cfg, str(folder))
    pool.start()
    try:
        process = psutil.Process(pool.members[0].processes[0].pid)
        alone_first = make_group(1, [LONG])
        pool.submit(alone_first)
        assert len(scores(pool, alone_first)) == 1
        peak = peak_mib(process)
        group = make_group(2, [LONG] + [40] * 63)
        pool.submit(group)
        found = scores(pool, group)
        assert len(found) == 64 and np.isfinite(found).all()
        assert peak_mib(process) < peak + 300
        too_long = make_group(3, [16_384, 30])
        pool.submit(too_long)
        verdicts = pool.collect(3)
        assert [v["orm"].status for v in verdicts] == ["ungradable", "ok"]
        assert "context of 16384" in verdicts[0]["orm"].reason
    finally:
        pool.stop()


def test_one_that_is_long_at_work_answers_its_probes_and_is_left_alone(
    cluster: None, tmp_path: Path
) -> None:
    folder = make_reward_model(tmp_path, 4, context=4096, hidden=256)
    cfg = settings(
        folder,
        "rollout.max_tokens=3000",
        "learner.micro_batch_tokens=4096",
        "cluster.probe_timeout_s=2",
        "reward_model.batch_tokens=3000",
    )
    pool = RewardModelPool(cfg, str(folder))
    pool.start()
    cfg.reward_model.timeout_s = 2.0  # a start takes longer
    try:
        groups = [make_group(i, [2900] * 10) for i in range(4)]
        began = time.monotonic()
        for g in groups:
            pool.submit(g)
        assert all(np.isfinite(scores(pool, g)).all() for g in groups)
        assert time.monotonic() - began > 2 * 2.0  # more than a probe, or one batch of answers, has
        assert pool.restarts == 0
    finally:
        pool.stop()


def peak_mib(process: psutil.Process) -> float:
    """Highest resident set so far (Linux)."""
    line = next(
        x
        for x in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if x.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def test_a_model_with_another_vocabulary_is_refused(folders: list[Path], tmp_path: Path) -> None:
    check_vocabulary("orm", str(folders[1]), str(folders[0]))
    check_vocabulary("orm", NEW, str(folders[0]))
    other = make_reward_model(tmp_path / "other", 0)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"7"', '"\u00e9"'))
    with pytest.raises(
        ConfigError, match="reward.models.orm.path=.*2 tokens differ.*policy's tokenizer"
    ):
        check_vocabulary("orm", str(other), str(folders[0]))
    for file in other.glob("tokenizer*"):
        file.unlink()
    check_vocabulary("orm", str(other), str(folders[0]))  # as many ids: taken to be the same
