"""The reward service inside a Ray actor and over HTTP, with a real tokenizer and real worker
processes.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from actors.modeling.tokenizer import build_tokenizer, save_tokenizer
from actors.records import ROLLOUT, SCORED
from reward_service.service import RewardService

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "rules": {"accuracy": 1.0, "format": 0.5},
    "combine": "sum",
    "timeout_s": 5.0,
    "options": {"max_tokens": 64},
}


def rollouts(completions: list[str], prompt_ids: list[str]) -> pa.RecordBatch:
    tokenizer, count = build_tokenizer(), len(completions)
    ids = [
        tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
        for text in completions
    ]
    columns = {
        "group_id": list(range(count)),
        "prompt_id": prompt_ids,
        "sample_index": [0] * count,
        "prompt_ids": [[7, 8]] * count,
        "completion_ids": ids,
        "behaviour_logprobs": [[0.0] * len(row) for row in ids],
        "versions": [[0] * len(row) for row in ids],
        "finish_reason": ["stop"] * count,
    }
    return pa.RecordBatch.from_pydict(
        {name: columns[name] for name in ROLLOUT.names}, schema=ROLLOUT
    )


def prompt(prompt_id: str, gold: str, prefill: str = "<think>") -> dict:
    return {
        "prompt_id": prompt_id,
        "question": "3+4=?",
        "gold": gold,
        "text": "Q: 3+4=?\nA: <think>",
        "prefill": prefill,
        "data_source": "arithmetic",
        "task": "math",
        "extra": {},
        "level": 2,
    }


@pytest.mark.timeout(300)
def test_actor_scores_a_batch_by_what_was_sampled(cluster: None, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    actor = (
        ray.remote(RewardService)
        .options(num_cpus=0.5)
        .remote(CONFIG, str(tmp_path / "tokenizer"), 2)
    )
    batch = rollouts(
        [
            "3+4=7</think><answer>7</answer>",
            "3+4=8</think><answer>8</answer>",
            "<answer>7</answer>",
            "x",
            "3+4=7</think><answer>7</answer>",
        ],
        ["a", "a", "plain", "a", "broken"],
    )
    prompts = [prompt("a", "7"), prompt("plain", "7", prefill=""), prompt("broken", "")]
    scored = ray.get(actor.score.remote(batch, prompts), timeout=120)
    assert scored.schema == SCORED
    assert scored.column("group_id").to_pylist() == [0, 1, 2, 3, 4]
    assert scored.column("reward").to_pylist() == [
        1.5,
        0.5,
        1.0,
        0.0,
        None,
    ]  # the prefilled tag counts; no silent zero
    assert scored.column("accuracy").to_pylist() == [1.0, 0.0, 1.0, 0.0, None]
    assert scored.column("format").to_pylist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert scored.column("status").to_pylist() == ["ok", "ok", "ok", "ok", "ungradable"]
    assert scored.column("extracted").to_pylist()[:2] == ["7", "8"]
    assert dict(scored.column("parts")[0].as_py()) == {"accuracy": 1.0, "format": 1.0}
    stats = ray.get(actor.stats.remote(), timeout=60)
    assert stats["counts"] == {"ok": 4, "ungradable": 1}
    assert "4/0" in stats["examples"]["ungradable"] and "gold" in stats["examples"]["ungradable"]
    with pytest.raises(ray.exceptions.RayTaskError, match="prompt_ids that were not passed"):
        ray.get(actor.score.remote(batch, prompts[:1]), timeout=60)
    ray.get(actor.close.remote(), timeout=60)
    ray.kill(actor)


def request(
    port: int, method: str, path: str, body: object = None, token: str | None = None
) -> tuple[int, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    text = response.read().decode()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


@pytest.mark.timeout(300)
def test_http_service_needs_its_token_and_grades_like_the_rest(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token, rows = (
        "a-long-random-test-token",
        [
            {
                "id": "a",
                "completion": "3+4</think><answer>7</answer>",
                "prefill": "<think>",
                "gold": "7",
            },
            {"id": "b", "completion": "\ud800<answer>8\ud800</answer>", "gold": "7"},
            {"id": "c", "completion": "<answer>8</answer>", "gold": ""},
        ],
    )
    env = {**os.environ, "VOLLEY_REWARD_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "reward_service.main",
                "serve",
                "--port",
                str(port),
                "--workers",
                "1",
            ],
            cwd=ROOT,
            env=env,
            stderr=log,
            stdout=log,
        )
    try:
        end = time.monotonic() + 200
        while "serving on" not in (tmp_path / "log").read_text():
            assert server.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[
                -2000:
            ]
            time.sleep(0.5)
        assert request(port, "POST", "/score", rows)[0] == 401
        assert request(port, "POST", "/score", rows, "a-wrong-but-long-token")[0] == 401
        status, found = request(port, "POST", "/score", rows, token)
        assert status == 200
        assert [row["reward"] for row in found] == [2.0, 0.0, None]
        assert [row["status"] for row in found] == ["ok", "ok", "ungradable"]
        assert [row["accuracy"] for row in found] == [1.0, 0.0, None]
        status, found = request(port, "POST", "/score", [{"completion": "x"}], token)
        assert status == 400 and "gold" in found["error"]
        assert request(port, "GET", "/nothing", None, token)[0] == 404
        status, stats = request(port, "GET", "/stats", None, token)
        assert (
            status == 200
            and stats["counts"] == {"ok": 2, "ungradable": 1}
            and "item c" in str(stats["examples"])
        )
        host = socket.gethostbyname(socket.gethostname())
        if not host.startswith("127."):  # only the loopback listens
            with pytest.raises(OSError):
                socket.create_connection((host, port), timeout=2)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
