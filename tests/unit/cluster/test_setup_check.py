"""Set-up says what is missing in one sentence that names the cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster import environment
from cluster.jobs import setup_check

ROOT = Path(__file__).parents[3]
PLENTY = 2**40


def check(
    version: tuple = (3, 11), missing: str = "", free: int = PLENTY, engine: str = "vllm-cpu"
) -> list[str]:
    which = {missing: None}.get
    return setup_check.problems_before(
        engine, version, lambda tool: which(tool, f"/bin/{tool}"), free
    )


def test_nothing_stands_in_the_way_of_a_good_machine() -> None:
    assert check() == check((3, 13)) == check(engine="vllm") == []


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (2, 7)])
def test_wrong_python_names_its_version_and_the_variable(version: tuple[int, int]) -> None:
    (sentence,) = check(version)
    assert f"Python {version[0]}.{version[1]} was found" in sentence and "PYTHON=" in sentence


def test_missing_compiler_names_the_package() -> None:
    (sentence,) = check(missing="g++")
    assert sentence.startswith("g++ was not found") and "apt install g++" in sentence


def test_full_disk_gives_both_numbers() -> None:
    (sentence,) = check(free=3 * 2**30)
    assert "3.0 GiB" in sentence and "5 GiB" in sentence


def test_unknown_engine_is_refused() -> None:
    (sentence,) = check(engine="vlm")
    assert sentence == "ENGINE=vlm: expected auto, vllm-cpu or vllm."


def test_wrong_build_of_torch_names_the_variable() -> None:
    assert (
        setup_check.torch_problem("vllm-cpu", None) is None
        and setup_check.torch_problem("vllm", "13.0") is None
    )
    assert "CUDA 13.0" in setup_check.torch_problem("vllm-cpu", "13.0")
    assert "TORCH_INDEX=" in setup_check.torch_problem("vllm-cpu", "13.0")
    assert "TORCH_INDEX" in setup_check.torch_problem("vllm", None)


def test_every_problem_makes_set_up_fail() -> None:
    command = [sys.executable, "cluster/jobs/setup_check.py", "before", "nonsense"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (
        run.returncode == 1
        and run.stderr == "set-up: ENGINE=nonsense: expected auto, vllm-cpu or vllm.\n"
    )


def test_set_up_and_runs_agree_where_compiled_operators_lie() -> None:
    assert environment.OPS_FOLDER == setup_check.OPS_FOLDER


def test_locks_pin_every_package_exactly_and_differ_in_the_engine() -> None:
    locks = {}
    for name in ("cpu", "gpu"):
        lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
        pins = [line.split("==") for line in lines if not line.startswith("#")]
        assert all(len(pin) == 2 and "+" not in pin[1] for pin in pins), name
        assert len({pin[0].lower() for pin in pins}) == len(pins), name
        locks[name] = dict(pins)
    assert "vllm-cpu" in locks["cpu"] and "vllm" not in locks["cpu"] and "vllm" in locks["gpu"]
    assert (
        locks["cpu"]["vllm-cpu"] == locks["gpu"]["vllm"]
        and locks["cpu"]["torch"] == locks["gpu"]["torch"]
    )
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(locks["cpu"])


def test_a_variable_the_user_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    env = environment.generator_env(kv_cache_gib=1.0)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "7" and env["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in environment.process_env(gpus=1.0)
    assert str(Path(sys.prefix) / "bin") in env["PATH"].split(":")
