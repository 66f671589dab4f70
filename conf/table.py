"""The settings table of docs/configuration.md: `python -m conf.table` writes it from the schema."""

from __future__ import annotations

import json
from pathlib import Path

from conf.field import MISSING
from conf.schema import Config
from conf.settings import bounds, choices, declarations, get

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARK = "<!-- The rest is written by: python -m conf.table -->\n"


def table() -> str:
    """A Markdown table: every key, its default, what is allowed, and what it means."""
    rows = ["| setting | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    default = Config()
    for key, declared in declarations().items():
        value = get(default, key)
        written = "" if value in (MISSING, "", {}) else json.dumps(value)
        allowed = " \\| ".join(map(str, choices(key))) or str(bounds(key))
        rows.append(f"| `{key}` | {written} | {allowed} | {declared.metadata['help']} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The text of the page with a table that is up to date. Raises ValueError without the mark."""
    introduction, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE.name} does not contain the line {MARK.strip()}")
    return introduction + mark + table()


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
