"""Imports go one way and never in a circle; modules of decisions load no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import (
    circles,
    file_graph,
    folder_graph,
    imports,
    loads_at_import,
    modules,
    upward,
)

ROOT = Path(__file__).parents[2]
ENGINES = ("ray", "vllm", "deepspeed")
# Modules and folders at the edge, where actors, engines and processes are. Only these may load an
# engine; every other module of the product holds decisions and is tested without one.
EDGE = (
    "cluster.supervision.pool",
    "cluster.supervision.remote",
    "cluster.supervision.supervisor",
    "actors.given",
    "actors.generator",
    "actors.reference",
    "actors.rollout_log",
    "actors.rollouts",
    "actors.weight_transfer",
    "reward_service.client",
    "reward_service.http",
    "reward_service.models.pool",
    "reward_service.step_labels.tasks",
    "learner.engine.group",
    "learner.engine.rank",
    "learner.engine.reward_rank",
    "learner.stage",
    "learner.stages",
)
# Everything between the command line and the first check of the settings.
QUICK_TO_IMPORT = ("conf.schema", "conf.compose", "learner.main")
SLOW_TO_IMPORT = (*ENGINES, "torch", "transformers", "wandb", "pandas", "matplotlib")


def at_the_edge(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in EDGE)


def loaded_after(names: list[str], watched: tuple[str, ...]) -> list[str]:
    """Which of the `watched` modules a fresh interpreter holds after importing `names`."""
    code = (
        f"import json, sys, importlib; [importlib.import_module(m) for m in {names!r}];"
        f"print(json.dumps([m for m in {list(watched)!r} if m in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


# ---- one direction, no circles ---------------------------------------------------------------


def test_nothing_imports_what_stands_above_it() -> None:
    assert upward(imports(modules(ROOT))) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(file_graph(imports(modules(ROOT)))) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    files = modules(ROOT)
    assert circles(folder_graph(imports(files), files)) == []


def test_the_product_imports_neither_tests_nor_benchmarks() -> None:
    files = modules(ROOT) | modules(ROOT, ("tests", "benchmarks"))
    outside = [
        str(edge)
        for edge in imports(files)
        if edge.target.split(".")[0] in ("tests", "benchmarks")
        and edge.importer.split(".")[0] not in ("tests", "benchmarks")
    ]
    assert outside == []


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """Five rooms with a file or two each, whose imports all go the right way."""
    for name, text in {
        "conf/schema.py": "",
        "cluster/plan.py": "from conf import schema",
        "cluster/jobs/head.py": "import cluster.plan",
        "actors/records.py": "from cluster.plan import memory",
        "reward_service/pool.py": "import actors.records",
        "learner/run.py": "def start():\n    from reward_service.pool import Pool",
        "learner/engine/rank.py": "from ..run import start",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return tmp_path


def test_the_test_itself_accepts_a_good_tree(small_tree: Path) -> None:
    files = modules(small_tree)
    edges = imports(files)
    assert [str(e) for e in edges] == [
        "actors.records -> cluster.plan",
        "cluster.jobs.head -> cluster.plan",
        "cluster.plan -> conf.schema",
        "learner.engine.rank -> learner.run",
        "learner.run -> reward_service.pool",
        "reward_service.pool -> actors.records",
    ]
    assert upward(edges) == circles(file_graph(edges)) == circles(folder_graph(edges, files)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from learner.run import start",
        "def f():\n    import learner.run",
        "class A:\n    def f(self):\n        if self:\n            from learner import run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import learner.run",
    ],
    ids=["top", "function", "method", "type-checking"],
)
def test_the_test_itself_sees_an_upward_import(small_tree: Path, line: str) -> None:
    (small_tree / "cluster" / "plan.py").write_text(line + "\n")
    assert upward(imports(modules(small_tree))) == ["cluster.plan -> learner.run"]


def test_the_test_itself_sees_a_circle_of_files(small_tree: Path) -> None:
    (small_tree / "actors" / "records.py").write_text("from actors import rollouts\n")
    (small_tree / "actors" / "rollouts.py").write_text("import actors.staleness\n")
    (small_tree / "actors" / "staleness.py").write_text("def f():\n    from .records import Row\n")
    edges = imports(modules(small_tree))
    assert upward(edges) == []
    assert circles(file_graph(edges)) == ["actors.records, actors.rollouts, actors.staleness"]


def test_the_test_itself_sees_a_circle_of_folders(small_tree: Path) -> None:
    """Four files in two folders: no circle of files, but each folder needs the other."""
    for name, text in {
        "learner/reports/a.py": "import learner.stages.b",
        "learner/stages/b.py": "",
        "learner/stages/c.py": "import learner.reports.d",
        "learner/reports/d.py": "",
    }.items():
        (small_tree / name).parent.mkdir(exist_ok=True)
        (small_tree / name).write_text(text + "\n")
    files = modules(small_tree)
    edges = imports(files)
    assert circles(file_graph(edges)) == []
    assert circles(folder_graph(edges, files)) == ["learner.reports, learner.stages"]


# ---- pure decisions ---------------------------------------------------------------------------


def test_only_modules_at_the_edge_load_an_engine() -> None:
    loaded = loads_at_import(modules(ROOT), ENGINES)
    assert {m: sorted(e) for m, e in loaded.items() if e and not at_the_edge(m)} == {}


def test_no_package_that_a_pure_module_imports_loads_an_engine() -> None:
    """The test above reads source; this one imports all pure modules into one interpreter."""
    pure = [m for m in modules(ROOT) if not at_the_edge(m)]
    assert len(pure) > 40 and loaded_after(pure, ENGINES) == []


@pytest.mark.parametrize("module", QUICK_TO_IMPORT)
def test_the_way_to_a_config_error_imports_nothing_slow(module: str) -> None:
    assert loaded_after([module], SLOW_TO_IMPORT) == []


def test_the_test_itself_sees_an_engine_behind_another_module(small_tree: Path) -> None:
    (small_tree / "cluster" / "plan.py").write_text("def f():\n    import vllm\n")
    (small_tree / "actors" / "records.py").write_text("import cluster.plan\nimport ray.util\n")
    loaded = loads_at_import(modules(small_tree), ENGINES)
    assert loaded["cluster.plan"] == set() and loaded["actors.records"] == {"ray"}
    assert loaded["reward_service.pool"] == {"ray"}
    assert loaded["learner.run"] == set()  # it imports the pool inside a function


def test_the_watch_itself_works() -> None:
    assert loaded_after(["json"], ("json", "ray")) == ["json"]
