"""The report: self-contained, complete, and safe against what a model writes."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.monitoring.sinks import MetricLog
from cluster.monitoring.stat import MetricError, Stat
from learner.reports import report

ROOT = Path(__file__).parents[3]
EVIL = "</pre><script>alert('x')</script><img src=x onerror=y>&amp; <think>1+1</think>"


def rollout(
    step: int, prompt_id: str, completion: str, reward: float | None = 1.0, index: int = 0
) -> dict:
    return {
        "step": step,
        "group_id": 1,
        "prompt_id": prompt_id,
        "sample_index": index,
        "prompt": f"<b>Q {prompt_id}</b>",
        "completion": completion,
        "reward": reward,
        "accuracy": reward,
        "format": 1.0,
        "status": "ok" if reward is not None else "timeout",
        "finish_reason": "stop",
        "advantage": 0.0,
        "version": 0,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    log = MetricLog(tmp_path)
    for step in (1, 2, 3):
        log.log(
            step,
            {
                "reward": Stat.of([0, step]),
                "reward/accuracy": step / 4,
                "response_length": Stat.of([5, 9]),
                "actor/entropy": math.nan if step == 2 else 0.5,
                "timing_s/gen": 1.0,
                "timing_s/update": 2.0,
                "timing_s/step": 3.1,
                "regime/learnable": 0.75,
                "regime/saturated": 0.25,
            },
        )
    log.close()
    before = {"pass@1": 0.3, "pass@8": 0.9, "maj@8": 0.4, "format": 0.8, "length": 12.0}
    after = before | {"pass@1": 0.925, "length": 24.0}
    summary = {
        "experiment": "r1_zero<",
        "steps": 3,
        "wall_s": 61.2,
        "before": before,
        "after": after,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "rollouts").mkdir()
    for step, rows in {
        1: [
            rollout(1, "a", EVIL),
            rollout(1, "b", "early b"),
            rollout(1, "b", "second sample", index=1),
        ],
        3: [rollout(3, "0", "late only"), rollout(3, "b", "late b", reward=None)],
        2: [rollout(2, "b", "middle")],
    }.items():
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts" / f"step-{step}.parquet")
    return tmp_path


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_page_has_table_plots_and_first_and_last_completions(run_dir: Path) -> None:
    text = report.write(run_dir).read_text()
    for shown in (
        "0.300",
        "0.925",
        "+0.625",
        "+12.0",
        "wall_s 1:01",
        "early b",
        "late b",
        "timeout",
        "late only",
    ):
        assert shown in text, shown
    assert "middle" not in text and "second sample" not in text
    png = (run_dir / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG") and base64.b64encode(png).decode() in text


def test_what_a_model_wrote_is_escaped_and_nothing_is_fetched(run_dir: Path) -> None:
    text = report.write(run_dir).read_text()
    tags = Tags(text).seen
    assert {t for t, _ in tags} <= {
        "html",
        "meta",
        "title",
        "style",
        "h1",
        "h2",
        "p",
        "table",
        "tr",
        "td",
        "img",
        "pre",
        "span",
    }
    assert (
        "&lt;script&gt;" in text and "&amp;amp; &lt;think&gt;1+1" in text and "r1_zero&lt;" in text
    )
    sources = [a["src"] for t, a in tags if t == "img"]
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,")
    assert not re.search(r"https?://", text)


def test_the_same_prompts_are_shown_first(run_dir: Path) -> None:
    shown = report.samples(run_dir)
    assert {s: [r["prompt_id"] for r in rows] for s, rows in shown.items()} == {
        1: ["b", "a"],
        3: ["b", "0"],
    }


def test_null_is_a_gap_not_a_zero(run_dir: Path) -> None:
    _, rows = report.read(run_dir / "metrics.jsonl")
    steps, values = report.series(rows, "actor/entropy")
    assert steps == [1, 2, 3] and values[0] == 0.5 and math.isnan(values[1])
    titles = {axis.get_title() for axis in report.figure(rows).axes if axis.get_visible()}
    assert titles == {
        "Reward and accuracy",
        "Answer length",
        "Entropy and KL",
        "Wall time of a step",
        "Groups by regime",
    }


def test_a_run_that_goes_on_or_kept_no_rollouts_still_reports(tmp_path: Path) -> None:
    MetricLog(tmp_path).close()
    assert "<table>" not in report.write(tmp_path).read_text()


def test_not_a_run_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MetricError, match="no metrics.jsonl"):
        report.write(tmp_path)
    command = [sys.executable, "-m", "learner.reports.report", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (
        run.returncode == 1 and run.stderr.startswith("report: ") and "Traceback" not in run.stderr
    )


def test_rollouts_of_another_layout_are_named(run_dir: Path) -> None:
    table = pa.table({"step": [9], "text": ["x"]})
    for file in (run_dir / "rollouts").iterdir():
        pq.write_table(table, file)
    with pytest.raises(MetricError, match="no column prompt_id"):
        report.write(run_dir)
