"""What a run prints: a live view in a terminal or else one line for each step, and a table of
before and after."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster.monitoring.vocabulary import REGIMES, UNDETERMINED

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 40
# Label, written metric name and format, the most important first.
SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.1%}"),
    ("format", "reward/format", "{:.1%}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("KL", "actor/kl_loss", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("grad norm", "actor/grad_norm", "{:.3f}"),
    ("all-equal groups", "reward/zero_std_share", "{:.0%}"),
    ("loss", "pretrain/loss", "{:.4f}"),
    ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
    ("step", "timing_s/step", "{:.2f} s"),
)
# The rows of the table of before and after, and their format. A name ending in @ is for every k.
MEASURES = (
    ("pass@", "{:.3f}"),
    ("maj@", "{:.3f}"),
    ("best@", "{:.3f}"),
    ("weighted_maj@", "{:.3f}"),
    ("format", "{:.3f}"),
    ("length", "{:.1f}"),
)


def sparkline(values: list[float]) -> str:
    """Return one character for each value, scaled between the smallest and the largest. A value
    that is not finite leaves a gap."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        BARS[round((v - low) / span * (len(BARS) - 1))] if math.isfinite(v) else " " for v in values
    )


def duration(seconds: float) -> str:
    """Return a time as 1:02:03, 2:03 or 3 s."""
    seconds = round(seconds)
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


class Progress:
    """Shows how far a run is. Call `update` once a step, `note` for a line of text and, at the end,
    `close` (a `with` block does so).

    steps: of the whole run. mode: auto (live on a terminal, otherwise plain) | live | plain | off.
    done: steps that were done before this program began."""

    def __init__(
        self,
        steps: int,
        mode: str = "auto",
        title: str = "",
        stream: TextIO | None = None,
        done: int = 0,
    ):
        stream = stream or sys.stdout
        if mode == "auto":
            mode = "live" if stream.isatty() else "plain"
        self.steps, self.mode, self.title, self.done = steps, mode, title, done
        self.first = done
        self.values: dict[str, float] = {}
        self.history: dict[str, deque[float]] = {}
        self.activity = "starting"
        self.left_s = 0.0
        self.console = Console(file=stream, soft_wrap=True, highlight=False)
        self.began: float | None = None
        self.live = Live(
            get_renderable=self.render, console=self.console, refresh_per_second=2, transient=True
        )

    def __enter__(self) -> Progress:
        if self.mode == "live":
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def phase(self, name: str) -> None:
        """Name what the run does now, for the live view. The first call starts the clock of the
        time left."""
        self.activity = name
        self.began = self.began or time.monotonic()

    def note(self, text: str) -> None:
        """Print a line above the live view; it stays."""
        if self.mode != "off":
            self.console.print(text, markup=False)

    def update(self, step: int, values: Mapping[str, float], now: float | None = None) -> None:
        """Show a finished step. `step` counts from 1; `values` is what MetricLog.log returned;
        `now`: monotonic seconds, for tests."""
        now = time.monotonic() if now is None else now
        if self.began is None:
            self.began = now - values.get("timing_s/step", 0.0)
        self.done, self.values = step, dict(values)
        for _, name, _ in SHOWN:
            if name in values:
                self.history.setdefault(name, deque(maxlen=HISTORY)).append(values[name])
        self.left_s = (now - self.began) / max(1, step - self.first) * (self.steps - step)
        if self.mode == "plain":
            self.console.print(self.plain_line(), markup=False)

    def plain_line(self) -> str:
        """Return the line of the last step."""
        parts = [
            f"{label} {form.format(self.values[name])}"
            for label, name, form in SHOWN
            if name in self.values
        ]
        if regimes := self.regimes():
            parts.append(regimes)
        return (
            f"step {self.done}/{self.steps}  "
            + "  ".join(parts)
            + f"  left {duration(self.left_s)}"
        )

    def regimes(self) -> str:
        """Return the shares of the four determined regimes: `saturated 25% learnable 70% collapsed
        5% scattered 0%`."""
        shares = [
            (r, self.values[f"regime/{r}"])
            for r in REGIMES
            if r != UNDETERMINED and f"regime/{r}" in self.values
        ]
        return " ".join(f"{r} {share:.0%}" for r, share in shares)

    def render(self) -> Panel:
        """Return the live view."""
        grid = Table.grid(padding=(0, 2))
        for label, name, form in SHOWN:
            if name in self.values:
                value = Text(form.format(self.values[name]), style="bold")
                grid.add_row(label, value, sparkline([*self.history[name]]))
        if regimes := self.regimes():
            grid.add_row("groups", Text(regimes), "")
        left = f"{duration(self.left_s)} left" if self.done > self.first else self.activity
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self.steps), completed=self.done, width=40)
        head.add_row(
            f"step {self.done}/{self.steps}",
            bar,
            left,
            self.activity if self.done > self.first else "",
        )
        return Panel(Group(head, grid), title=self.title, title_align="left", border_style="dim")

    def close(self) -> None:
        """Remove the live view. Safe to call twice."""
        if self.mode == "live":
            self.live.stop()
            self.mode = "plain"


def comparison_rows(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, str, str, str]]:
    """Return rows (measure, before, after, change) as text, pass@k in order of k. A measure that
    was not taken is "-"."""
    rows = []
    for prefix, form in MEASURES:
        names = [
            n
            for n in {**before, **after}
            if n == prefix or (prefix[-1] == "@" and n.startswith(prefix))
        ]
        for name in sorted(
            names, key=lambda n: (int("0" + n.partition("@")[2].partition("/")[0]), n)
        ):
            old, new = before.get(name), after.get(name)
            change = "-" if old is None or new is None else f"{round(new - old, 3):+}"
            rows.append((name, *("-" if v is None else form.format(v) for v in (old, new)), change))
    return rows


def comparison(
    before: Mapping[str, Any], after: Mapping[str, Any], title: str = "Held-out set"
) -> Table:
    """Return the table at the end of a run, for `rich`."""
    table = Table(title=title, title_justify="left")
    for column, justify in (
        ("", "left"),
        ("before", "right"),
        ("after", "right"),
        ("change", "right"),
    ):
        table.add_column(column, justify=justify)
    for row in comparison_rows(before, after):
        table.add_row(*row)
    return table
