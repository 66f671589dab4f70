"""The Markdown pages of the project, read as text: links, tables, code blocks, wide lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)")


def lines_outside_code(page: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of every line that is not inside a fenced block of code."""
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def links(page: Path) -> list[Path]:
    """The files that a page's relative links lead to, whether they exist or not."""
    targets = (t for _, line in lines_outside_code(page) for t in LINK.findall(line))
    relative = (t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t))
    return [(page.parent / target).resolve() for target in relative]


def dead_links(pages: list[Path]) -> list[str]:
    return [
        f"{page.name} -> {target}"
        for page in pages
        for target in links(page)
        if not target.exists()
    ]


def reachable(start: Path) -> set[Path]:
    """Every Markdown page that links lead to from `start`, which is one of them."""
    seen: set[Path] = set()
    waiting = [start.resolve()]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.suffix == ".md" and page.exists():
            seen.add(page)
            waiting += links(page)
    return seen


def wide_lines(page: Path, width: int) -> list[str]:
    """Lines over `width` characters, tables and code left out."""
    return [
        f"{page.name}:{number} ({len(line)} characters)"
        for number, line in lines_outside_code(page)
        if len(line) > width and not line.startswith("|")
    ]


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next heading of the same or a higher level."""
    text = page.read_text()
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading, f"{page.name} has no section {title!r}"
    rest = text[heading.end() :]
    end = re.search(rf"^#{{1,{len(heading.group(1))}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """The cells of the first table in a text, without its head."""
    table = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table[2:]]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of code in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
