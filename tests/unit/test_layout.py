"""Folders, files, functions and lines stay small enough to read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.source_tree import ROOMS, functions, modules

ROOT = Path(__file__).parents[2]
FILES_PER_FOLDER, LINES_PER_FILE, LINES_PER_FUNCTION, LINE_WIDTH = 12, 500, 60, 100
SOURCE = {**modules(ROOT), **modules(ROOT, ("benchmarks",))}


def too_wide(files: list[Path]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number} ({len(line)} characters)"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if len(line) > LINE_WIDTH
    ]


def test_a_folder_holds_a_dozen_files_at_most() -> None:
    folders = Counter(f.parent.relative_to(ROOT) for f in SOURCE.values() if f.stem != "__init__")
    assert {str(name): n for name, n in folders.items() if n > FILES_PER_FOLDER} == {}


def test_a_file_has_500_lines_at_most() -> None:
    lengths = {f.relative_to(ROOT): len(f.read_text().splitlines()) for f in SOURCE.values()}
    assert {str(f): n for f, n in lengths.items() if n > LINES_PER_FILE} == {}


def test_a_function_has_60_lines_at_most() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{line} {name} ({length} lines)"
        for file in SOURCE.values()
        for name, line, length in functions(file)
        if length > LINES_PER_FUNCTION
    ]
    assert long == []


@pytest.mark.parametrize("folder", [*ROOMS, "benchmarks", "tests"])
def test_a_line_has_100_characters_at_most(folder: str) -> None:
    top = ROOT / folder
    assert too_wide([*sorted(top.rglob("*.py")), *sorted(top.rglob("*.yaml"))]) == []


def test_every_folder_of_tests_is_named_as_a_room() -> None:
    """`tests/` mirrors the rooms; what several rooms share lies beside them."""
    for kind in ("unit", "flow"):
        folders = {p.parent.name for p in (ROOT / "tests" / kind).glob("*/test_*.py")}
        assert folders <= {*ROOMS}
