"""Each check of a start, made to fail for a reason of its own; nothing is started here."""

from __future__ import annotations

import json
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.data.build import build_dataset
from actors.data.prompt import Prompt
from actors.modeling.loading import ModelError, load_model, model_size, weight_files
from cluster import plan
from conf.schema import Config, StageConfig
from learner.main import load
from learner.preflight import checks as preflight_checks
from learner.preflight import machine, rewards, table
from learner.preflight.checks import Preflight
from learner.preflight.machine import PreflightError
from learner.preflight.table import ALL, QUICK

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def cfg(monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return load(["experiment=r1_zero", "cluster.address=local"])


@pytest.fixture
def checks(cfg: Config, tmp_path: Path) -> Preflight:
    found = Preflight(cfg, tmp_path / "runs" / "one")
    found.model()
    return found


def error_of(check: Any, *args: Any) -> str:
    with pytest.raises((PreflightError, ModelError, ValueError)) as caught:
        check(*args)
    return str(caught.value)


# ---- the table -----------------------------------------------------------------------------------


def test_all_is_well(cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.report(cfg, tmp_path / "run") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line[:14].strip().replace(" ", "_") for line in lines[:-1]] == list(ALL)
    assert (
        "256 samples a step" in out
        and "969,920 parameters" in out
        and "8 of 8 right answers judged right" in out
    )
    assert lines[-1] == "volley: ready to run" and err == ""
    assert not (tmp_path / "run").exists()


def test_the_first_failure_ends_it(
    cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg.generator.kv_cache_gib = 1e6
    assert table.report(cfg, tmp_path / "run") == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["settings", "model", "memory"]
    assert "FAIL" in out.splitlines()[-1] and err.startswith("volley: error: memory: needs about ")


def test_a_start_makes_the_same_checks_without_a_word(
    cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.quick(cfg, tmp_path) == []
    assert capsys.readouterr() == ("", "") and set(QUICK) < set(ALL)
    cfg.generator.kv_cache_gib = 1e6
    assert "generator cache 1000000.0 GiB" in error_of(table.quick, cfg, tmp_path)


# ---- one by one ----------------------------------------------------------------------------------


def test_memory_says_the_numbers(checks: Preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    need = sum(plan.memory(checks.cfg, checks.size).values())
    more = sum(plan.passing(checks.cfg, checks.size).values())
    monkeypatch.setattr(preflight_checks, "free_memory", lambda: need - 1)
    assert f"needs about {plan.amount(need)}" in error_of(checks.memory)
    monkeypatch.setattr(preflight_checks, "free_memory", lambda: need + more)
    checks.memory()
    assert checks.notes == []
    monkeypatch.setattr(preflight_checks, "free_memory", lambda: need + more - 1)
    checks.memory()
    assert "learner.micro_batch_tokens" in checks.notes[0]


def test_memory_counts_reward_models(
    checks: Preflight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "vocab_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros((1000, 7), np.float32)}, tmp_path / "model.safetensors")
    without = checks.memory()
    checks.cfg.reward.models = {"orm": {"path": str(tmp_path)}, "prm": {"path": "new"}}
    assert {n: m.parameters for n, m in checks.reward_models().items()} == {
        "orm": 7000,
        "prm": checks.size.parameters,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"volley_reward": {"head": "implicit", "beta": 0.1}})
    )
    assert {n: m.frozen for n, m in checks.reward_models().items()} == {"orm": 7000, "prm": 0}
    checks.cfg.reward_model.head = "implicit"
    assert checks.reward_models()["prm"].frozen == checks.size.parameters
    checks.cfg.reward_model.head = "scalar"
    monkeypatch.setattr(preflight_checks, "free_memory", lambda: 0)
    assert "reward models 4 MiB" in error_of(checks.memory) and "reward models" not in without
    (tmp_path / "model.safetensors").unlink()
    assert error_of(checks.memory).startswith(f"reward.models.orm.path={tmp_path}: has no weights")
    checks.cfg.stage = StageConfig("pretrain", "corpus", "policy", False)
    assert checks.reward_models() == {}


@pytest.mark.parametrize(
    "files, left",
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "1000", "memory.current": "300"}, 700),
        ({"memory.max": "1000", "memory.current": "1300"}, 0),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"}, 800),
    ],
)
def test_free_memory_minds_the_control_group(
    files: dict[str, str], left: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = machine.free_memory(tmp_path)
    assert found == left if left is not None else found > 1 << 20


def test_a_full_disk_and_a_small_shared_memory(
    checks: Preflight, monkeypatch: pytest.MonkeyPatch
) -> None:
    need, store = plan.disk(checks.cfg, checks.size), checks.cfg.cluster.object_store_mib << 20
    free = {"/dev/shm": store, "disk": need}
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda p: Usage(0, 0, free.get(str(p), free["disk"]))
    )
    checks.folder(), checks.object_store()
    free.update({"/dev/shm": store - 1, "disk": need - 1})
    assert "checkpoint.keep=2" in error_of(checks.folder)
    message = error_of(checks.object_store)
    assert "cluster.object_store_mib=512" in message and "--shm-size" in message


def test_checkpoints_on_a_disk_of_their_own(
    checks: Preflight, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, whole = plan.published(checks.cfg, checks.size), plan.disk(checks.cfg, checks.size)
    apart = tmp_path / "apart"
    apart.mkdir()
    free = {str(apart): whole - model}
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda p: Usage(0, 0, free.get(str(p), model))
    )
    assert "checkpoint.keep=2" in error_of(checks.folder)  # all of it in run_dir
    checks.cfg.checkpoint.folder = str(apart / "new")
    checks.folder()
    free[str(apart)] -= 1
    assert error_of(checks.folder).startswith(f"checkpoint.folder={apart}/new: ")
    checks.cfg.checkpoint.folder = "s3://bucket/run"
    assert "s3://bucket/run is tried" in checks.folder()


def test_weights_that_do_not_fit_into_the_store_are_a_note(checks: Preflight) -> None:
    checks.size = plan.ModelSize((257 << 20) // 4)
    checks.object_store()
    assert "two versions of the weights (514 MiB)" in checks.notes[0]


def test_a_run_dir_that_cannot_be_written(checks: Preflight) -> None:
    checks.run_dir = Path("/proc/1/run")
    assert error_of(checks.folder).startswith(
        "run_dir=/proc/1/run: nothing can be written in /proc/1"
    )


def test_a_cluster_is_reached_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert machine.reach(address, 5.0) == f"{address} answers"
        assert machine.reach(f"ray://{address}", 5.0)
    message = error_of(machine.reach, address, 5.0)
    assert (
        message.startswith(f"cluster.address={address}: no answer within 5 s")
        and "ray status" in message
    )
    for wrong in ("head", "head:port", "http://head:80", "1.2.3.4:99999"):
        assert f"cluster.address={wrong}" in error_of(machine.reach, wrong, 1.0)


def test_token(cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "will be made" in Preflight(cfg, tmp_path).token()
    cfg.cluster.address = "10.0.0.1:6379"
    assert "none is there" in Preflight(cfg, tmp_path).token()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert "set RAY_AUTH_TOKEN" in error_of(Preflight(cfg, tmp_path).token)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    assert Preflight(cfg, tmp_path).token() == "from RAY_AUTH_TOKEN"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    checks = Preflight(cfg, tmp_path)
    assert "not asked for" in checks.token() and "can run code" in checks.notes[0]


# ---- the model -----------------------------------------------------------------------------------


def tiny_folder(folder: Path, cfg: Config) -> Path:
    """A copy of the embedded model without its weights."""
    folder.mkdir()
    for file in Path(cfg.model.path).iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_pickle_is_refused_by_name(cfg: Config, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "pickled", cfg)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")  # never opened
    cfg.model.path = str(folder)
    for check in (weight_files, model_size, load_model):
        message = error_of(check, str(folder) if check is weight_files else cfg.model)
        assert (
            f"model.path={folder}: has only pytorch_model.bin" in message
            and "*.safetensors" in message
        )
    (folder / "pytorch_model.bin").unlink()
    assert "has no weights" in error_of(model_size, cfg.model)


def test_size_is_read_from_headers(cfg: Config, tmp_path: Path) -> None:
    embedded = model_size(cfg.model)
    assert (embedded.parameters, embedded.layers, embedded.hidden, embedded.vocabulary) == (
        969_920,
        3,
        160,
        103,
    )
    fresh = load(
        ["experiment=pretrain_tiny"]
    ).model  # nothing on disk: counted from the architecture
    assert model_size(fresh) == embedded
    folder = tiny_folder(tmp_path / "sharded", cfg)
    for i, shape in enumerate([(3, 5), (7,)]):
        save_file(
            {f"w{i}": np.zeros(shape, np.float32)}, folder / f"model-0000{i}-of-00002.safetensors"
        )
    cfg.model.path = str(folder)
    assert model_size(cfg.model).parameters == 22
    whole = (folder / "model-00000-of-00002.safetensors").read_bytes()
    (folder / "model-00000-of-00002.safetensors").write_bytes(whole[:-8])
    assert "model-00000-of-00002.safetensors is damaged" in error_of(model_size, cfg.model)


def test_weights_that_are_not_finite(checks: Preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(checks.cfg.model)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("inf")
    monkeypatch.setattr(preflight_checks, "load_model", lambda *_: model)
    assert "model.layers.1.mlp.up_proj.weight holds values that are not finite" in error_of(
        checks.weights
    )


def test_code_of_a_model_is_not_run(cfg: Config, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "remote", cfg)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    cfg.model.path = str(folder)
    assert f"model.path={folder}" in error_of(model_size, cfg.model)
    assert not (tmp_path / "ran").exists()


# ---- the rewards ---------------------------------------------------------------------------------


def sums(cfg: Config, n: int = 3) -> list[Prompt]:
    return build_dataset(cfg.data, "heldout").prompts()[:n]


def test_rewards_judge_known_answers(cfg: Config) -> None:
    assert rewards.probe_rewards(cfg, sums(cfg)) == (
        "3 of 3 right answers judged right; a wrong one gets 0.2",
        "",
    )


def test_a_gold_answer_that_cannot_be_graded(cfg: Config) -> None:
    from dataclasses import replace

    broken = [replace(p, gold="") for p in sums(cfg)]
    message = error_of(rewards.probe_rewards, cfg, broken)
    assert "4 of 4 rewards of known answers are not ok" in message and "ungradable" in message
    assert "reward.max_failure_share=0.1" in message
    cfg.reward.max_failure_share = 0.5  # one in four is told and no obstacle
    _, note = rewards.probe_rewards(cfg, [*sums(cfg, 2), broken[0]])
    assert "1 of 4 not ok, such as: ungradable" in note


@pytest.mark.parametrize(
    "code, words",
    [
        ("return 1.0", "calls -7654321.5 a right answer"),
        ("return 0.0", "calls the data set's own answer"),
        ("raise OSError('no server')", "error, OSError: no server"),
        ("return float('nan')", "expected a finite number"),
    ],
)
def test_a_reward_of_ones_own(cfg: Config, tmp_path: Path, code: str, words: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    {code}\n"
    )
    cfg.reward.rules = {"accuracy": 1.0}
    cfg.reward.options = {"custom": {"accuracy": {"style": "verl", "path": str(file)}}}
    assert words in error_of(rewards.probe_rewards, cfg, sums(cfg))


def test_a_task_without_a_known_answer(cfg: Config) -> None:
    prompts = [
        Prompt("p", "q", json.dumps([{"stdin": "", "stdout": "1"}]), "q", "", "code", "code")
    ]
    seen, note = rewards.probe_rewards(cfg, prompts)
    assert "0 of 0 right answers" in seen and "only a wrong one was scored" in note
