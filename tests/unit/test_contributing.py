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


REWARD = """
import json
from learner.main import load
from reward_service.rules.item import RewardItem
from reward_service.rules.scorer import Scorer
cfg = load(["+reward.rules.brief=0.5", "+reward.options.brief.words=2"]).reward
scorer = Scorer({"rules": {"brief": cfg.rules["brief"]}, "options": dict(cfg.options)})
scores = [scorer(RewardItem("x", text, "7")) for text in ("about 7", "it is about 7")]
print(json.dumps([[s.total, s.parts] for s in scores]))
"""


def test_the_reward_rule_is_weighed_and_scored(copy: Path) -> None:
    assert answer(copy, REWARD) == [[0.5, {"brief": 1.0}], [0.0, {"brief": 0.0}]]


DATA = """
import json
from actors.data.build import build_dataset
from learner.main import load
cfg = load(["data=squares", "data.heldout_size=2"]).data
train, heldout = (build_dataset(cfg, split) for split in ("train", "heldout"))
first = [train.get(i) for i in (0, 8, 9)]
print(json.dumps([[p.question, p.gold] for p in [*first, *heldout.prompts()]]))
"""


def test_the_data_set_is_selected_and_split(copy: Path) -> None:
    train = [["1*1=?", "1"], ["9*9=?", "81"], ["11*11=?", "121"]]
    assert answer(copy, DATA) == [*train, ["0*0=?", "0"], ["10*10=?", "100"]]


MODEL = """
import json, sys
from learner.main import load
model = load(sys.argv[1:]).model
print(json.dumps([model.path, model.init]))
"""


def test_the_model_is_used_from_its_folder(copy: Path, tmp_path: Path) -> None:
    (command,) = blocks(PAGE.read_text(), "bash")
    arguments = command.partition("learner.main ")[2]
    shutil.copytree(ROOT / "actors" / "modeling" / "assets" / "tiny", tmp_path / "mine")
    arguments = arguments.replace("path/to/model", str(tmp_path / "mine"))
    assert answer(copy, MODEL, *arguments.split()) == [str(tmp_path / "mine"), "pretrained"]


STAGE = """
import json, sys, time
from pathlib import Path
from cluster.stopping import Stopping
from learner.checkpoints import checkpoint
from learner.launch import Launch
from learner.main import load
from learner.stage import run_stage
from learner.stages.table import pipeline
folder = Path(sys.argv[1])
cfg = load(["stage=levels", f"run_dir={folder}", "logging.wandb=disabled",
            "logging.ray_metrics=false"])
(stage,) = pipeline(cfg)
launch = Launch(cfg, folder, time.monotonic(), Stopping(), checkpoint.open_store(cfg, folder), None)
run_stage(stage, launch)
print((folder / "levels.json").read_text())
"""


def test_the_stage_is_selected_and_run_by_the_loop(copy: Path, tmp_path: Path) -> None:
    levels = answer(copy, STAGE, str(tmp_path))
    assert set(levels) == {"2", "3", "4"} and sum(levels.values()) == 100


METRIC = """
import json
from cluster.monitoring.metrics import flatten, table
from cluster.monitoring.stat import Stat
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
