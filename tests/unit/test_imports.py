"""Decisions are pure: their modules import no Ray, vLLM or DeepSpeed. A config mistake is answered without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINES = ("ray", "vllm", "deepspeed")
PURE = (
    "actors.data.prompts", "actors.records", "actors.staleness",
    "learner.algorithms.advantages", "learner.algorithms.parts", "learner.algorithms.table", "learner.algorithms.batching", "learner.reports.compare", "actors.data.corpus",
    "learner.evaluation.measures", "learner.evaluation.guards", "learner.algorithms.kl", "learner.algorithms.losses", "learner.algorithms.regimes", "learner.reports.report",
    "actors.modeling.tokenizer",
    "reward_service.math.grading", "reward_service.rules.rules",
    "cluster.environment", "cluster.supervision.failures", "cluster.supervision.health", "cluster.monitoring.metrics", "cluster.placement", "cluster.plan",
    "cluster.monitoring.progress", "cluster.security",
)  # fmt: skip
# Everything between the command line and the first check of the settings.
FAST = ("conf.schema", "learner.main")
SLOW_TO_IMPORT = (*ENGINES, "torch", "transformers", "wandb", "pandas", "matplotlib")


def exists(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()


def loaded_after(module: str, watched: tuple[str, ...]) -> list[str]:
    """Which of `watched` a fresh interpreter holds after importing the module."""
    code = (
        f"import json, sys, importlib; importlib.import_module({module!r});"
        f"print(json.dumps([m for m in {list(watched)!r} if m in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", [m for m in PURE if exists(m)])
def test_pure_module_imports_no_engine(module: str) -> None:
    assert loaded_after(module, ENGINES) == []


@pytest.mark.parametrize("module", [m for m in FAST if exists(m)])
def test_the_way_to_a_config_error_imports_nothing_slow(module: str) -> None:
    assert loaded_after(module, SLOW_TO_IMPORT) == []


def test_the_watch_itself_works(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ray; print('ray' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "True"
    assert loaded_after("json", ("json", "ray")) == ["json"]
