"""The representation of mathematical expressions, and the bounds on their size.

Expressions are nested tuples: ("n", Fraction), ("s", name), ("c", "pi" | "e" | "i" | "inf"), ("+",
a, b), ("*", a, b), ("/", a, b), ("^", a, b), ("-", a), ("!", a), ("%", a), ("f", name, a, ...).
"""

from __future__ import annotations

from collections.abc import Iterator

Expr = tuple
MAX_DEPTH, MAX_TOKENS, MAX_DIGITS, MAX_BITS = 60, 4000, 20_000, 200_000


def nodes(expr: Expr) -> Iterator[Expr]:
    """The expression itself and all of its sub-expressions."""
    stack = [expr]
    while stack:
        node = stack.pop()
        yield node
        stack += [child for child in node[1:] if isinstance(child, tuple)]


def symbols(expr: Expr) -> set[str]:
    """The names of the free symbols of an expression."""
    return {node[1] for node in nodes(expr) if node[0] == "s"}
