"""Metrics: the split changes no reduction, shares lie in [0, 1], JSON is always valid."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.monitoring import metrics, sinks
from cluster.monitoring.metrics import MetricError, flatten
from cluster.monitoring.sinks import MetricLog
from cluster.monitoring.stat import Accumulator, Stat


def test_a_mean_is_not_a_mean_of_means() -> None:
    # 1 value of 10 and 3 values of 2: the mean is 16/4 = 4, while the mean of the two means is 6.
    merged = Stat.of([10]).merge(Stat.of([2, 2, 2]))
    assert (merged.sum, merged.count, merged.min, merged.max) == (16, 4, 2, 10)
    assert merged.mean == 4


def test_any_split_and_order_reduces_to_the_same() -> None:
    values = [float(v) for v in range(-7, 20)]
    whole = Stat.of(values)
    rng = random.Random(0)
    for _ in range(20):
        rng.shuffle(values)
        cut = rng.randrange(len(values) + 1)
        total = Accumulator()
        for part in (values[:cut], values[cut:]):
            total.merge({"actor/entropy": Stat.of(part)})
        assert total["actor/entropy"] == whole


def test_an_empty_stat_is_neutral_and_its_mean_is_no_number() -> None:
    assert Stat().merge(Stat.of([3])) == Stat.of([3]) == Stat.of([3]).merge(Stat())
    assert math.isnan(Stat().mean)
    assert math.isnan(flatten({"reward": Stat()})["reward/min"])


def test_nan_is_not_hidden_by_min_or_max() -> None:
    nan, one = Stat.of([math.nan]), Stat.of([1])
    of_a_loss = Stat(math.nan, 1.0, math.nan, math.nan)
    for stat in (
        Stat.of([1, math.nan, 2]),
        nan.merge(one),
        one.merge(nan),
        Stat().merge(of_a_loss).merge(one),
    ):
        assert all(math.isnan(v) for v in flatten({"reward": stat}).values())
    total = Accumulator()
    for part in ({"reward": one}, {"reward": nan}, {"reward": one}):
        total.merge(part)
    assert all(math.isnan(v) for v in flatten(total).values())


def test_a_sum_of_negative_zeros_is_written_as_zero() -> None:
    """A policy loss of advantages 0 sums to -0.0, which a metrics file should not show."""
    total = Accumulator()
    total.add("actor/pg_loss", Stat(-0.0, 3.0, -0.0, -0.0))
    assert math.copysign(1.0, total["actor/pg_loss"].sum) == 1.0


def test_accumulator_merges_the_stats_of_the_losses() -> None:
    total = Accumulator()
    total.add("actor/kl_loss", Stat(6.0, 3.0, 1.0, 3.0))
    total.add("actor/kl_loss", Stat(2.0, 1.0, 2.0, 2.0))
    assert total["actor/kl_loss"] == Stat(8.0, 4.0, 1.0, 3.0)
    assert flatten(total) == {"actor/kl_loss": 2.0}


def test_spread_writes_mean_min_max() -> None:
    assert flatten({"response_length": Stat.of([2, 4, 9])}) == {
        "response_length/mean": 5, "response_length/min": 2, "response_length/max": 9
    }  # fmt: skip
    with pytest.raises(MetricError, match="give a Stat"):
        flatten({"response_length": 3.0})


def test_unknown_name_is_refused_by_name() -> None:
    for name in ("reward/acuracy", "regime/dead", "groups/lost", "timing_s/", "reward_part/{rule}"):
        with pytest.raises(MetricError, match=name.replace("{", r"\{").replace("}", r"\}")):
            flatten({name: 0.5})


@pytest.mark.parametrize("value", [8.0, -0.25, 1.001])
def test_a_share_outside_zero_to_one_is_refused(value: float) -> None:
    with pytest.raises(MetricError, match=f"'eval/pass@8' is a share, but its value is {value}"):
        flatten({"eval/pass@8": value})


def test_a_stat_cannot_be_logged_where_one_number_is_meant() -> None:
    with pytest.raises(MetricError, match="give a single number"):
        flatten({"actor/lr": Stat.of([1.0])})


def test_file_is_json_lines_with_units_and_flags_what_is_not_finite(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, run_meta={"seed": 3})
    written = log.log(
        1, {"actor/loss": math.inf, "actor/grad_norm": Stat.of([1, 3]), "timing_s/gen": math.nan}
    )
    log.close()
    header, row = (
        json.loads(t, parse_constant=_no_constants) for t in (tmp_path / "metrics.jsonl").open()
    )
    assert header["schema"] == sinks.SCHEMA and header["run"] == {"seed": 3}
    assert header["units"]["timing_s/step"] == "s"
    assert row["actor/loss"] is None and row["timing_s/gen"] is None
    assert row["non_finite"] == ["actor/loss", "timing_s/gen"]
    assert row["actor/grad_norm"] == 2 and row["step"] == 1 and row["time"] > 1e9
    assert written["actor/loss"] == math.inf


def _no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_resume_drops_rows_of_steps_made_again_and_a_torn_line(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, run_meta={"seed": 3})
    for step in (1, 2, 3):
        log.log(step, {"actor/lr": 0.1 * step})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "actor/l')
    log = MetricLog(tmp_path, run_meta={"seed": 3}, resume_step=2)
    log.log(3, {"actor/lr": 9.0})
    log.close()
    _, rows = sinks.read(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["actor/lr"]) for r in rows] == [(1, 0.1), (2, 0.2), (3, 9.0)]


def test_going_back_inside_a_run_drops_the_rows_of_steps_made_again(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, run_meta={"seed": 3})
    for step in (0, 1, 2, 3):
        log.log(step, {"reward/accuracy": step / 4})
    log.rewind(1)
    log.log(2, {"reward/accuracy": 1.0})
    log.close()
    header, *rows = [
        json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert header["run"] == {"seed": 3}
    assert [(r["step"], r["reward/accuracy"]) for r in rows] == [(0, 0.0), (1, 0.25), (2, 1.0)]


def test_a_torn_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"schema": "volley-metrics/1"}\n{"st\n{"step": 2}\n')
    with pytest.raises(MetricError, match="line 2"):
        sinks.read(tmp_path / "metrics.jsonl")
    with pytest.raises(MetricError, match="line 2"):
        MetricLog(tmp_path, resume_step=5)


def test_every_written_name_has_unit_and_help() -> None:
    for name, metric in metrics.METRICS.items():
        assert (
            metric.unit
            and metric.help
            and metric.reduce in ("last", "mean", "sum", "min", "max", "spread")
        ), name
    assert metrics.describe("response_length/max").help == "completion length (max)"
    assert metrics.describe("eval/pass@64").unit == "share"


def test_loss_names_map_to_defined_metrics() -> None:
    for name in metrics.LOSS_NAMES.values():
        metrics.find(name)


def test_prometheus_names_are_legal_and_distinct() -> None:
    names = [sinks.prometheus_name(n) for n in metrics.METRICS if "{" not in n]
    assert len(set(names)) == len(names)
    assert sinks.prometheus_name("eval/pass@8") == "volley_eval_pass_8"


def test_docs_table_equals_the_registry() -> None:
    doc = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert doc.read_text() == metrics.DOC + metrics.table(), (
        "run `python -m cluster.monitoring.metrics`"
    )


def test_importing_metrics_and_progress_is_cheap() -> None:
    code = (
        "import sys, cluster.monitoring.sinks, cluster.monitoring.progress; "
        "print(sys.modules.keys() & {'ray', 'wandb', 'torch'})"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "set()"


def test_wandb_gets_the_settings_and_no_secret_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["main", "steps=3", "reward.options.api_key=sesame"])
    log = MetricLog(
        tmp_path, wandb="offline", run_meta={"seed": 3}, settings={"rollout": {"group_size": 8}}
    )
    assert (
        log.wandb_run.config["rollout"] == {"group_size": 8} and log.wandb_run.config["seed"] == 3
    )
    log.close()
    assert sys.argv[2] == "reward.options.api_key=sesame"
    written = b"".join(p.read_bytes() for p in (tmp_path / "wandb").rglob("*") if p.is_file())
    assert b"reward.options.api_key=(hidden)" in written and b"sesame" not in written


def test_wandb_goes_on_in_the_same_run(tmp_path: Path) -> None:
    first = MetricLog(tmp_path, wandb="offline", run_meta={"seed": 3})
    first.log(1, {"actor/lr": 0.1})
    first.close()
    again = MetricLog(
        tmp_path, wandb="offline", run_meta={"seed": 3}, wandb_id=first.wandb_id, resume_step=1
    )
    assert again.wandb_run.id == again.wandb_id == first.wandb_id
    again.log(2, {"actor/lr": 0.2})
    again.close({"done": True})
    assert {p.name.split("-")[3] for p in (tmp_path / "wandb").glob("offline-run-*")} == {
        first.wandb_id
    }
    other = MetricLog(tmp_path / "fork", wandb="offline")
    assert other.wandb_id != first.wandb_id
    other.close()
