"""The pages say what the code says, every link leads somewhere, and every page can be found."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from conf.table import with_table
from tests.pages import blocks, dead_links, reachable, rows, section, wide_lines

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
PATH = re.compile(
    r"`((?:conf|cluster|actors|reward_service|learner|tests|benchmarks)/(?:[\w./]*\.\w+|[\w/]*/|))`"
)


def names_defined(file: Path) -> set[str]:
    """Names that a Python file defines at its top level."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names.update(t.id for t in targets if isinstance(t, ast.Name))
    return names


# ---- links and form --------------------------------------------------------------------------


def test_every_relative_link_leads_to_a_file() -> None:
    assert len(PAGES) > 10 and dead_links(PAGES) == []


def test_every_page_is_reachable_from_the_readme() -> None:
    lost = {page.resolve() for page in PAGES} - reachable(ROOT / "README.md")
    assert sorted(page.name for page in lost) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_line_has_120_characters_at_most(page: Path) -> None:
    assert wide_lines(page, 120) == []


def test_the_tests_above_see_what_they_look_for(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "[a](docs/a.md), [site](https://host/x) and [b](gone.md#x)\n"
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        f"{'x' * 121}\n| {'x' * 121} |\n```\n{'x' * 121}\n```\n"
    )
    (tmp_path / "docs" / "lost.md").write_text("[a](a.md)\n")
    start, page = tmp_path / "README.md", tmp_path / "docs" / "a.md"
    assert dead_links([start]) == [f"README.md -> {tmp_path / 'gone.md'}"]
    assert reachable(start) == {start, page}
    assert wide_lines(page, 120) == ["a.md:1 (121 characters)"]


# ---- what the pages say about the code ---------------------------------------------------------


def test_configuration_table_is_that_of_the_schema() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert page == with_table(page), "run python -m conf.table"


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="does not contain the line"):
        with_table("# Settings\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("a changelog names files as they were called")
    paths = {p for p in PATH.findall(page.read_text()) if not re.search(r"NAME|\*", p)}
    assert sorted(p for p in paths if not (ROOT / p).exists()) == []


def test_the_map_of_a_newcomers_questions_is_true() -> None:
    questions = rows(section(DOCS / "architecture.md", "Where is ...?"))
    assert len(questions) == 10
    for question, file, name in questions:
        path = ROOT / file.strip("`")
        assert path.is_file(), f"{question}: {file} does not exist"
        assert name.strip("`") in names_defined(path), f"{question}: {file} has no {name}"
        assert len(path.relative_to(ROOT).parts) <= 3, f"{question}: {file} is over two hops away"


def test_the_glossary_is_in_order_and_its_files_exist() -> None:
    entries = rows((DOCS / "glossary.md").read_text())
    words = [word.lower() for word, _, _ in entries]
    assert words == sorted(words) and len(words) == len(set(words)) > 30
    missing = [word for word, _, file in entries if not (ROOT / file.strip("`")).is_file()]
    assert missing == []


def test_the_drawing_of_the_rooms_names_folders_that_exist() -> None:
    drawing = blocks(section(DOCS / "architecture.md", "The rooms"), "")[0]
    room = ""
    for line in drawing.splitlines():
        if line[0] != " ":
            room = line.split("/")[0]
        inside = re.findall(r"(?<![\w/])(\w+)/", line)
        missing = [f for f in inside if f != room and not (ROOT / room / f).is_dir()]
        assert missing == [], f"{room}: {missing}"
    assert {"conf", "cluster", "actors", "reward_service", "learner"} <= set(
        re.findall(r"^(\w+)/", drawing, re.MULTILINE)
    )


def test_every_entry_of_the_log_has_its_four_parts() -> None:
    text = (DOCS / "log.md").read_text()
    for entry in text.split("\n## ")[1:]:
        title, _, body = entry.partition("\n")
        parts = re.findall(r"^\*\*([\w ]+)[.]\*\*", body, re.MULTILINE)
        assert parts == ["Question", "Command", "Result", "So what"], title
