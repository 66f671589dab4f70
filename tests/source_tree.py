"""The project's own source, read without importing it: modules, imports between them, sizes.

The tests of the project's structure work on these plain values, so they can be tried on a small
tree in a temporary folder too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# A room may import the rooms before it in this list, and no other.
ROOMS = ("conf", "cluster", "actors", "reward_service", "learner")


@dataclass(frozen=True)
class Import:
    """One import statement's effect: `importer` needs `target`, both full module names."""

    importer: str
    target: str
    when_loaded: bool  # False inside a function or under TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.importer} -> {self.target}"


def modules(root: Path, tops: Iterable[str] = ROOMS) -> dict[str, Path]:
    """Module name -> file, for every Python file below the named top-level folders of `root`."""
    files = (path for top in tops for path in sorted((root / top).rglob("*.py")))
    return {
        ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p
        for p in files
    }


def statements(tree: ast.AST, when_loaded: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Every import statement with whether it runs when the module is loaded."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, when_loaded
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements(node, False)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(ast.Module(node.body, []), False)
            yield from statements(ast.Module(node.orelse, []), when_loaded)
        else:
            yield from statements(node, when_loaded)


def imported_names(module: str, file: Path) -> Iterator[tuple[str, bool]]:
    """Full dotted names that a file imports, with whether this happens when it is loaded.

    `from a.b import c` yields `a.b.c`, which may be a module or a name inside `a.b`.
    """
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node, when_loaded in statements(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, when_loaded) for alias in node.names)
        else:
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", when_loaded) for alias in node.names)


def imports(files: Mapping[str, Path]) -> list[Import]:
    """All imports between the given modules, those inside functions included."""
    found = set()
    for module, file in files.items():
        for name, when_loaded in imported_names(module, file):
            target = name
            while target and target not in files:
                target = target.rpartition(".")[0]
            if target and target != module:
                found.add(Import(module, target, when_loaded))
    return sorted(found, key=str)


def upward(edges: Iterable[Import], rooms: tuple[str, ...] = ROOMS) -> list[str]:
    """The imports that go against the direction of the rooms."""
    level = {room: number for number, room in enumerate(rooms)}
    return [
        str(edge)
        for edge in edges
        if level[edge.importer.split(".")[0]] < level[edge.target.split(".")[0]]
    ]


def folder(module: str, files: Mapping[str, Path]) -> str:
    """The folder inside a room that a module belongs to; a file at the top of a room is itself."""
    parts = module.split(".")
    inside = len(parts) > 2 or (len(parts) == 2 and files[module].name == "__init__.py")
    return ".".join(parts[:2]) if inside else module


def folder_graph(edges: Iterable[Import], files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Which folders each folder imports, imports within a folder left out."""
    graph: dict[str, set[str]] = {}
    for edge in edges:
        start, end = folder(edge.importer, files), folder(edge.target, files)
        if start != end:
            graph.setdefault(start, set()).add(end)
    return graph


def file_graph(edges: Iterable[Import]) -> dict[str, set[str]]:
    """Which modules each module imports."""
    graph: dict[str, set[str]] = {}
    for edge in edges:
        graph.setdefault(edge.importer, set()).add(edge.target)
    return graph


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that follows from `start` in one or more steps."""
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph.get(node, ()))
    return seen


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Groups of nodes that lead back to themselves, each as its sorted names joined by commas."""
    after = {node: reachable(graph, node) for node in graph}
    groups = {
        tuple(sorted(n for n in after[node] if node in after.get(n, ())))
        for node in graph
        if node in after[node]
    }
    return [", ".join(group) for group in sorted(groups)]


def third_party(files: Mapping[str, Path], own: Iterable[str], standard: Iterable[str]) -> set[str]:
    """Top-level names of the packages that the files import and that are not the project's own."""
    names = {
        name.split(".")[0]
        for module, file in files.items()
        for name, _ in imported_names(module, file)
    }
    return names - {*own} - {*standard}


def loads_at_import(files: Mapping[str, Path], packages: Iterable[str]) -> dict[str, set[str]]:
    """For each module, which of these packages loading it loads, through other modules too.

    Loading `a.b.c` also loads `a` and `a.b`.
    """
    direct: dict[str, set[str]] = {module: set() for module in files}
    graph: dict[str, set[str]] = {module: set() for module in files}
    watched = {*packages}
    for module, file in files.items():
        parts = module.split(".")
        parents = [".".join(parts[:n]) for n in range(1, len(parts))]
        graph[module].update(p for p in parents if p in files)
        for name, when_loaded in imported_names(module, file):
            if when_loaded and name.split(".")[0] in watched:
                direct[module].add(name.split(".")[0])
    for edge in imports(files):
        if edge.when_loaded:
            graph[edge.importer].add(edge.target)
    return {
        module: set().union(direct[module], *(direct[m] for m in reachable(graph, module)))
        for module in files
    }


def functions(file: Path) -> Iterator[tuple[str, int, int]]:
    """(name, first line, number of lines) of every function in a file, docstring included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1
