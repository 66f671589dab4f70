"""The pool: hard deadlines, killed workers replaced, no item lost, statuses instead of zeros; the
user's own rewards."""

from __future__ import annotations

import http.server
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.reward_items import adversarial
from reward_service import main
from reward_service.processes import RewardPool, RewardPoolError
from reward_service.rules.item import RewardItem

ROOT = Path(__file__).resolve().parents[3]
GOOD = "<think>w</think><answer>{}</answer>"
# a user's file in verl's shape, which misbehaves on demand
USER = """
import asyncio, os, signal, subprocess, time
def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    act = (extra_info or {}).get("act")
    if act == "hang": time.sleep(1000)
    if act == "spin":
        while True: pass
    if act == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)
    if act == "child":
        pid = subprocess.Popen(["sleep", "1000"]).pid
        with open(extra_info["file"], "w") as file: file.write(str(pid))
        time.sleep(1000)
    if act == "crash": os.kill(os.getpid(), signal.SIGKILL)
    if act == "exit": raise SystemExit(3)
    if act == "raise": raise KeyError("no such thing")
    if act == "nan": return float("nan")
    if act == "text": return "1.0"
    if act == "dict": return {"score": 0.5, "acc": 1.0, "note": "words"}
    if act == "noscore": return {"acc": 1.0}
    if act == "print": print("printed by a user's function")
    if act == "sleep": time.sleep(0.2)
    return scale * (ground_truth in solution_str)
async def slow_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return 2.0
def length(prompts, completions, answer, **columns):
    assert columns["data_source"] == ["src"] and columns["level"] == [3]
    return [float(len(c)) for c in completions]
async def chat(prompts, completions, **kwargs):
    return [len(c[0]["content"]) + len(p[0]["content"]) for p, c in zip(prompts, completions)]
def silent(prompts, completions, **kwargs):
    return [None] * len(completions)
"""


def items(count: int) -> list[RewardItem]:
    return [RewardItem(str(n), GOOD.format(n), str(n)) for n in range(count)]


def acting(act: str, number: int = 0) -> RewardItem:
    return RewardItem(
        f"{act}{number}",
        GOOD.format("yes"),
        "yes",
        data_source="src",
        extra={"act": act, "level": 3},
    )


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "user_rewards.py"
    path.write_text(USER)
    return path


def user_config(file: Path, timeout_s: float = 1.0, **settings: object) -> dict:
    custom = {"mine": {"style": "verl", "path": str(file), **settings}}
    return {"rules": {"mine": 1.0}, "timeout_s": timeout_s, "options": {"custom": custom}}


def test_results_come_in_order_from_several_calling_threads() -> None:
    with RewardPool({"rules": {"accuracy": 1.0}}, 2) as pool:
        found: dict[int, list] = {}
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: pool.score(items(200 + n))}))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for n in range(4):
            assert [result.id for result in found[n]] == [str(i) for i in range(200 + n)]
            assert all((result.status, result.total) == ("ok", 1.0) for result in found[n])
        assert pool.counts["ok"] == 806
        assert pool.score([]) == []


def test_only_the_item_past_its_deadline_times_out(user_file: Path) -> None:
    with RewardPool(user_config(user_file), 2) as pool:
        batch = [acting("fine", n) for n in range(40)]
        for place, act in ((3, "hang"), (20, "spin"), (21, "deaf")):
            batch[place] = acting(act)
        start = time.monotonic()
        results = pool.score(batch)
        assert time.monotonic() - start < 6.0  # three deadlines of 1 s, on two workers
        assert [result.id for result in results] == [item.id for item in batch]
        assert [n for n, result in enumerate(results) if result.status == "timeout"] == [3, 20, 21]
        assert all(result.total == 1.0 for n, result in enumerate(results) if n not in (3, 20, 21))
        assert math.isnan(results[3].total) and "timeout_s=1" in results[3].reason
        stats = pool.stats()
        assert stats["counts"]["timeout"] == stats["counts"]["worker_kills"] == 3
        assert stats["examples"]["timeout"].status == "timeout" and stats["pending"] == 0


def test_a_worker_killed_mid_batch_loses_no_item(user_file: Path) -> None:
    with RewardPool(user_config(user_file, timeout_s=20.0), 2) as pool:
        found: list = []
        batch = [acting("sleep", n) for n in range(24)]
        thread = threading.Thread(target=lambda: found.extend(pool.score(batch)))
        thread.start()
        for _ in range(2):
            time.sleep(0.7)
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        thread.join(30)
        assert [result.id for result in found] == [item.id for item in batch]
        assert all(result.total == 1.0 for result in found)
        assert pool.counts["worker_deaths"] == 2


def test_an_idle_worker_that_is_killed_is_replaced(user_file: Path) -> None:
    with RewardPool(user_config(user_file), 1) as pool:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        assert [result.total for result in pool.score([acting("fine"), acting("fine")])] == [
            1.0,
            1.0,
        ]
        assert pool.counts["worker_deaths"] == 1


def test_what_a_worker_started_is_killed_with_it(user_file: Path, tmp_path: Path) -> None:
    with RewardPool(user_config(user_file), 1) as pool:
        [result] = pool.score(
            [RewardItem("x", "y", "y", extra={"act": "child", "file": str(tmp_path / "pid")})]
        )
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    assert result.status == "timeout"
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_item_that_kills_its_worker_ends_as_an_error_and_others_go_on(user_file: Path) -> None:
    with RewardPool(user_config(user_file), 1) as pool:
        results = pool.score([acting("fine"), acting("crash"), acting("fine")])
        assert [result.status for result in results] == ["ok", "error", "ok"]
        assert "died 3 times" in results[1].reason and math.isnan(results[1].total)


def test_whatever_a_users_function_does_has_a_status(user_file: Path) -> None:
    acts = ["raise", "nan", "text", "noscore", "exit", "dict", "fine"]
    with RewardPool(user_config(user_file, kwargs={"scale": 3.0}), 1) as pool:
        results = dict(zip(acts, pool.score([acting(act) for act in acts]), strict=True))
    assert {act for act, result in results.items() if result.status == "error"} == set(acts[:5])
    assert "KeyError" in results["raise"].reason and "SystemExit" in results["exit"].reason
    assert results["dict"].total == 0.5 and results["dict"].parts == {"mine": 0.5, "mine/acc": 1.0}
    assert results["fine"].total == 3.0


@pytest.mark.parametrize(
    "settings, total",
    [
        ({"style": "verl", "function": "slow_score"}, 2.0),
        ({"style": "trl", "function": "length"}, float(len(GOOD.format("yes")))),
        (
            {"style": "trl", "function": "chat", "conversational": True},
            float(len(GOOD.format("yes"))),
        ),
    ],
)
def test_sync_and_async_functions_in_verls_and_trls_shape(
    user_file: Path, settings: dict, total: float
) -> None:
    with RewardPool(user_config(user_file, **settings), 1) as pool:
        [result] = pool.score([acting("fine")])
    assert (result.status, result.total) == ("ok", total)


def test_trls_none_means_the_reward_does_not_apply(user_file: Path) -> None:
    config = user_config(user_file, style="trl", function="silent")
    with RewardPool(config, 1) as pool:
        assert pool.score([acting("fine")])[0].status == "ungradable"
    with RewardPool({**config, "rules": {"mine": 1.0, "format": 0.5}}, 1) as pool:
        assert pool.score([acting("fine")])[0].total == 0.5


def test_openrlhfs_remote_reward_model() -> None:
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            broken = seen[-1]["labels"] == ["broken"]
            body = json.dumps({"rewards": [0.25], "extra_logs": {}}).encode()
            self.send_response(500 if broken else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/get_reward"
    custom = {"model": {"style": "remote", "url": url}}
    with RewardPool(
        {"rules": {"model": 2.0}, "timeout_s": 5.0, "options": {"custom": custom}}, 1
    ) as pool:
        good, bad = pool.score(
            [RewardItem("1", " a", "g", prompt="q"), RewardItem("2", " a", "broken", prompt="q")]
        )
    server.shutdown()
    assert seen[0] == {"query": ["q a"], "prompts": ["q"], "labels": ["g"]}
    assert (good.status, good.total) == ("ok", 0.5)
    assert bad.status == "error" and "500" in bad.reason


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"path": "/nowhere.py"}, "not a file"),
        ({"function": "nope"}, "not a function"),
        ({"style": "what"}, "style="),
        ({"pth": "x"}, "pth"),
    ],
)
def test_a_bad_setting_of_a_users_reward_stops_the_start(
    user_file: Path, settings: dict, words: str
) -> None:
    with pytest.raises(RewardPoolError, match=words):
        RewardPool(user_config(user_file, **settings), 1)


def test_back_pressure_admits_a_bounded_number(user_file: Path) -> None:
    config = user_config(user_file, timeout_s=20.0)
    config["options"]["max_pending"] = 8
    with RewardPool(config, 1) as pool:
        thread = threading.Thread(
            target=lambda: pool.score([acting("sleep", n) for n in range(20)])
        )
        thread.start()
        time.sleep(0.9)
        assert 1 <= pool.stats()["pending"] <= 8
        thread.join(20)
        assert pool.counts["ok"] == 20


def test_workers_come_with_demand_and_go_without(user_file: Path) -> None:
    with RewardPool(user_config(user_file, timeout_s=20.0), 2, idle_s=0.3) as pool:
        assert pool.stats()["workers"] == 1
        pool.score([acting("sleep", n) for n in range(20)])
        pool.score([acting("fine", n) for n in range(40)])
        most = pool.stats()["workers"]
        time.sleep(0.5)
        pool.score([acting("fine")])
        end = time.monotonic() + 8.0
        while pool.stats()["workers"] > 1 and time.monotonic() < end:
            time.sleep(0.1)
        assert most == 2 and pool.stats()["workers"] == 1


def test_a_closed_pool_says_so_and_leaves_no_process() -> None:
    pool = RewardPool({"rules": {"format": 1.0}}, 2)
    pids = [child.pid for child in multiprocessing.active_children()]
    assert pids
    pool.close()
    with pytest.raises(RewardPoolError, match="closed"):
        pool.score(items(1))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_adversarial_completions_through_the_pool(tmp_path: Path) -> None:
    """No hang past the deadline, no crash, no wrong answer accepted, no silent zero.

    VOLLEY_FUZZ_ITEMS=10000 is the full run.
    """
    mark, deadline = tmp_path / "mark", 5.0
    cases = adversarial(int(os.environ.get("VOLLEY_FUZZ_ITEMS", "1500")), seed=20, mark=str(mark))
    with RewardPool({"rules": {"accuracy": 1.0, "format": 1.0}, "timeout_s": deadline}, 2) as pool:
        for start in range(0, len(cases), 250):
            block = cases[start : start + 250]
            began = time.monotonic()
            results = pool.score([case.item for case in block])
            late = sum(result.status == "timeout" for result in results)
            assert time.monotonic() - began < 20.0 + late * deadline
            for case, result in zip(block, results, strict=True):
                assert result.id == case.item.id
                if result.status == "ok":
                    assert result.parts["accuracy"] == case.accuracy, (case.kind, ascii(result))
                else:
                    assert math.isnan(result.total)
                assert result.reason
        assert pool.counts["worker_deaths"] == 0
        assert pool.counts["ok"] == len(cases)
    assert not mark.exists()


def run_main(*args: str, **kwargs: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "reward_service.main", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **kwargs)


def test_command_line_grades_the_case_file_a_line_of_json_each() -> None:
    path = ROOT / "tests" / "data" / "grading" / "cases.jsonl"
    run = run_main("grade", "--completions", str(path), "--workers", "1")
    assert run.returncode == 0, run.stderr
    cases, rows = (
        [json.loads(line) for line in text.splitlines()] for text in (path.read_text(), run.stdout)
    )
    assert len(cases) == len(rows)
    for case, row in zip(cases, rows, strict=True):
        assert set(row) == {"id", "accuracy", "format", "status", "extracted", "reason"}
        assert (row["id"], row["accuracy"], row["status"]) == (
            case["id"],
            case["expect_accuracy"],
            "ok",
        )
        assert case["expect_format"] in (None, row["format"])


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"completion": "x", "gold": "1"}\n{"completion": "x"}\n', ["row 2", "'gold'"]),
        ('{"completion": 5, "gold": "1"}\n', ["row 1", "'completion'", "str"]),
        ("not json\n", ["row 1", "not JSON"]),
        ("", ["no rows"]),
        ("[1]\n", ["row 1", "object"]),
    ],
)
def test_a_bad_file_is_named_with_row_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture, text: str, words: list[str]
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main.main(["grade", "--completions", str(path), "--workers", "1"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in error
    assert all(word in error for word in ["error:", str(path), *words])


def test_what_a_users_function_prints_stays_out_of_the_output(
    user_file: Path, tmp_path: Path
) -> None:
    config, path = tmp_path / "reward.yaml", tmp_path / "rows.jsonl"
    config.write_text(json.dumps(user_config(user_file)))
    path.write_text(
        json.dumps({"id": "a", "completion": "yes \ud800", "gold": "yes", "act": "print"}) + "\n"
    )
    run = run_main("grade", "--completions", str(path), "--config", str(config), "--workers", "1")
    assert [json.loads(line)["status"] for line in run.stdout.splitlines()] == ["ok"]
    assert "printed by" in run.stderr
