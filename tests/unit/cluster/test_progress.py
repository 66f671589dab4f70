"""Progress: plain lines off a terminal, a live view on one, and the table at the end."""

from __future__ import annotations

import io
import math

from rich.console import Console

from cluster.monitoring.progress import Progress, comparison, comparison_rows, duration, sparkline

VALUES = {
    "reward/mean": 0.5,
    "reward/accuracy": 0.25,
    "response_length/mean": 17.04,
    "actor/kl_loss": 0.00125,
    "regime/saturated": 0.25,
    "regime/learnable": 0.5,
    "regime/collapsed": 0.125,
    "regime/scattered": 0.125,
    "perf/tokens_per_s": 1234.5,
    "timing_s/step": 2.0,
}
BEFORE = {
    "pass@1": 0.31,
    "pass@8": 0.9,
    "pass@64": 1.0,
    "maj@8": 0.5,
    "format": 0.8,
    "length": 14.9,
}
AFTER = {
    "pass@1": 0.93,
    "pass@8": 0.99,
    "pass@64": None,
    "maj@8": 0.99,
    "format": 1.0,
    "length": 24.63,
}


def test_plain_mode_writes_one_line_a_step_without_escapes() -> None:
    out = io.StringIO()
    with Progress(10, stream=out) as progress:  # auto, and a StringIO is no terminal
        progress.update(1, VALUES, now=100.0)
        progress.update(2, VALUES, now=102.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in out.getvalue()
    assert lines[1].startswith("step 2/10  reward 0.500  accuracy 25.0%  length 17.0  KL 0.0013")
    assert "saturated 25% learnable 50% collapsed 12% scattered 12%" in lines[1]
    # The clock began 2 s (timing_s/step) before step 1 ended: 2 steps in 4 s leave 8 steps of 2 s.
    assert lines[1].endswith("left 16 s")


def test_the_estimate_of_a_resumed_run_counts_only_its_own_steps() -> None:
    progress = Progress(10, mode="off", done=6)
    progress.update(7, {"timing_s/step": 3.0}, now=50.0)
    assert progress.left_s == 9.0


def test_off_is_silent_and_markup_of_a_note_is_not_interpreted() -> None:
    out = io.StringIO()
    Progress(3, mode="off", stream=out).update(1, VALUES)
    assert out.getvalue() == ""
    Progress(3, mode="plain", stream=out).note("an answer [bold]as is[/bold]")
    assert out.getvalue() == "an answer [bold]as is[/bold]\n"


def test_live_view_shows_values_bar_and_estimate() -> None:
    progress = Progress(10, mode="off", title="r1_zero")
    console = Console(width=110, record=True, file=io.StringIO())
    progress.phase("generating")
    console.print(progress.render())
    assert "generating" in console.export_text()
    progress.update(1, VALUES)
    progress.update(2, VALUES | {"reward/mean": math.nan})
    console.print(progress.render())
    text = console.export_text()
    for shown in ("r1_zero", "step 2/10", "accuracy", "25.0%", "1,234", "learnable 50%", "left"):
        assert shown in text


def test_live_view_is_taken_down_on_close() -> None:
    out = io.StringIO()
    progress = Progress(2, mode="live", stream=out)
    progress.update(1, VALUES)
    progress.close()
    progress.close()
    assert not progress.live.is_started


def test_sparkline_scales_and_leaves_gaps() -> None:
    assert sparkline([0, 1, math.nan, 0.5]) == "▁█ ▅"
    assert sparkline([2, 2]) == "▁▁" and sparkline([math.nan]) == ""


def test_duration_reads_well() -> None:
    assert [duration(s) for s in (3.4, 63, 3723)] == ["3 s", "1:03", "1:02:03"]


def test_comparison_has_measures_in_order_and_never_invents_a_number() -> None:
    rows = comparison_rows(BEFORE, AFTER)
    assert [r[0] for r in rows] == ["pass@1", "pass@8", "pass@64", "maj@8", "format", "length"]
    assert rows[0] == ("pass@1", "0.310", "0.930", "+0.62")
    assert rows[2] == ("pass@64", "1.000", "-", "-")
    assert rows[5] == ("length", "14.9", "24.6", "+9.73")
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(comparison(BEFORE, AFTER))
    assert "Held-out set" in console.export_text(clear=False) and "0.930" in console.export_text()
