"""The examples of docs/contributing.md work when they are applied to a copy of the source."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages import blocks, section
from tests.source_tree import ROOMS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing.md"


def hunks(diff: str) -> Iterator[tuple[str, str, str]]:
    """(file, text before, text after) of each hunk; the text before is empty for a new file."""
    for part in re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:]:
        head, *bodies = re.split(r"^@@.*\n", part, flags=re.MULTILINE)
        file = re.search(r"^\+\+\+ b/(.+)$", head, re.MULTILINE).group(1)
        for body in bodies:
            lines = [line or " " for line in body.splitlines()]
            before = [line[1:] for line in lines if line[0] in " -"]
            after = [line[1:] for line in lines if line[0] in " +"]
            yield file, "\n".join(before), "\n".join(after)


def apply(diff: str, root: Path) -> None:
    """Change the files below `root` as the diff says. A hunk must fit in exactly one place."""
    for file, before, after in hunks(diff):
        path = root / file
        if not before:
            assert not path.exists(), f"{file} exists already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{after}\n")
            continue
        text = f"\n{path.read_text()}"
        assert text.count(f"\n{before}\n") == 1, f"{file} does not have, once:\n{before}"
        path.write_text(text.replace(f"\n{before}\n", f"\n{after}\n")[1:])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with every example of the page applied."""
    root = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in blocks(PAGE.read_text(), "diff"):
        apply(diff, root)
    return root


def answer(copy: Path, code: str, *arguments: str) -> Any:
    """What the code prints last, as JSON, when it runs on the changed copy."""
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=copy,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(copy), "HOME": str(copy)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_every_kind_of_addition_has_one_example() -> None:
    titles = re.findall(r"^## (How to add .*)$", PAGE.read_text(), re.MULTILINE)
    kinds = ("algorithm", "reward rule", "data set", "model", "stage", "metric")
    for kind in kinds:
        (title,) = [t for t in titles if f" {kind}:" in t]
        text = section(PAGE, title)
        assert len(blocks(text, "diff")) + len(blocks(text, "bash")) == 1, title
    assert len(titles) == len(kinds)


ALGORITHM = """
import json
import numpy as np
from learner.algorithms.advantages import compute
from learner.algorithms.table import algorithms_table
from learner.main import load
cfg = load(["algorithm=sign"]).algorithm
found = compute(cfg, np.array([1.0, 0.2, 0.2, 0.6]), np.zeros(4, int), np.ones(4, bool))
print(json.dumps([cfg.loss, found.tolist(), "`sign`" in algorithms_table()]))
"""


def test_the_algorithm_is_selected_computed_and_documented(copy: Path) -> None:
    # The mean of the four rewards is 0.5.
    assert answer(copy, ALGORITHM) == ["ppo_clip", [1.0, -1.0, -1.0, 1.0], True]


METRIC = """
import json
from cluster.monitoring.metrics import Stat, flatten, table
found = flatten({"reward/example": Stat.of([1.0, 2.0])})
print(json.dumps([found, "`reward/example`" in table()]))
"""


def test_the_metric_is_reduced_and_documented(copy: Path) -> None:
    assert answer(copy, METRIC) == [{"reward/example": 1.5}, True]


def test_a_diff_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    diff = "--- a/a.py\n+++ b/a.py\n@@\n-{}\n+x = 3\n y = 2\n"
    with pytest.raises(AssertionError, match="does not have, once"):
        apply(diff.format("x = 2"), tmp_path)
    apply(diff.format("x = 1"), tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 3\ny = 2\n"
