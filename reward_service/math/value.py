"""From tokens to values, by a small strict grammar.

A text is read as a whole or not at all, so that no part of it can match alone. A value is an
expression or one of the classes below: a sequence, intervals, an assignment, a relation, a numeral
with a base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reward_service.math.evaluation import equal, evaluate
from reward_service.math.expression import MAX_DEPTH, MAX_TOKENS, Expr, symbols
from reward_service.math.parser import CLOSE, OPEN, Parser
from reward_service.math.text import Token, Unreadable

RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne"}
FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


@dataclass(frozen=True)
class Seq:
    """Several values. `kind` is list (unordered, also sets), tuple or ratio (both ordered).

    A matrix is a tuple of rows. `brackets` holds the opening and closing bracket of a tuple that
    could be an interval, else "".
    """

    kind: str
    items: tuple
    brackets: str = ""


@dataclass(frozen=True)
class Intervals:
    """A union of real intervals, in the order in which they were written.

    Each part is (low, whether low is open, high, whether high is open). `name` is the unknown, or
    "".
    """

    parts: tuple
    name: str = ""


@dataclass(frozen=True)
class Assign:
    """name = value. `function` says that the left side had the form f(x)."""

    name: str
    value: object
    function: bool = False


@dataclass(frozen=True)
class Relation:
    """left op right. `op` is one of =, <, \\le, \\ne; > and \\ge are turned around."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Based:
    """A numeral with a base, such as 463_8."""

    digits: str
    base: int


INF, NEG_INF = ("c", "inf"), ("-", ("c", "inf"))
REALS = Intervals(((NEG_INF, True, INF, True),))


def split(tokens: Sequence[Token], texts: set[str]) -> list[list[Token]]:
    """Splits the tokens at the operators `texts` outside of all brackets.

    Raises Unreadable if the brackets do not nest.
    """
    parts, depth = [[]], 0
    for token in tokens:
        if token.kind == "op":
            depth += (token.text in OPEN) - (token.text in CLOSE)
            if depth < 0:
                raise Unreadable("unbalanced brackets")
            if depth == 0 and token.text in texts:
                parts.append([])
                continue
        parts[-1].append(token)
    if depth:
        raise Unreadable("unbalanced brackets")
    return parts


def has(tokens: Sequence[Token], *texts: str) -> bool:
    """Whether one of the operators `texts` occurs among the tokens."""
    return any(token.kind == "op" and token.text in texts for token in tokens)


def read_list(tokens: Sequence[Token], depth: int = 0):
    """The value of a separated list, or of its item if it has only one.

    Raises Unreadable if the tokens cannot be read as a whole.
    """
    if len(tokens) > MAX_TOKENS or depth > MAX_DEPTH:
        raise Unreadable("too long or too deeply nested to evaluate")
    parts = [part for part in split(tokens, {",", ";", "or"}) if part]
    if not parts:
        raise Unreadable("empty")
    items = [value for part in parts for value in _expand_signs(part, depth)]
    if len(items) == 1:
        return items[0]
    if isinstance(items[0], Assign) and not any(
        isinstance(item, Assign | Relation) for item in items[1:]
    ):
        return Assign(items[0].name, Seq("list", (items[0].value, *items[1:])), items[0].function)
    if has(tokens, "or") and all(isinstance(item, Intervals) for item in items):
        return Intervals(tuple(part for item in items for part in item.parts), items[0].name)
    return Seq("list", tuple(items))


def _expand_signs(tokens: list[Token], depth: int) -> list:
    """The values of an item: two if it contains a plus-minus sign, else one."""
    if not has(tokens, r"\pm", r"\mp"):
        return [read_item(tokens, depth)]
    values = []
    for plus, minus in (("+", "-"), ("-", "+")):
        signs = {r"\pm": plus, r"\mp": minus}
        values.append(
            read_item(
                [
                    Token("op", signs.get(token.text, token.text), token.spaced)
                    if token.kind == "op"
                    else token
                    for token in tokens
                ],
                depth,
            )
        )
    if all(isinstance(value, Assign) for value in values):
        return [
            Assign(
                values[0].name,
                Seq("list", tuple(value.value for value in values)),
                values[0].function,
            )
        ]
    return values


def read_item(tokens: list[Token], depth: int = 0):
    """The value of one item of a list.

    It is a chain of relations, a set, an interval, a tuple, a ratio, a numeral with a base, or an
    expression. Raises Unreadable for anything else.
    """
    if has(tokens, r"\approx"):
        tokens = split(tokens, {r"\approx"})[0]  # "2\pi \approx 6.28" states 2 pi, with a remark
    member = split(tokens, {r"\in"})
    if len(member) == 2 and _left_name(member[0]):
        value = read_item(member[1], depth + 1)
        return as_intervals(value) or value
    if len(split(tokens, RELATIONS)) > 1:
        return _relation(tokens, depth)
    if len(split(tokens, {r"\cup"})) > 1:
        return _union([read_item(part, depth + 1) for part in split(tokens, {r"\cup"})])
    difference = split(tokens, {r"\setminus"})
    if len(difference) == 2 and read_item(difference[0], depth + 1) == REALS:
        holes = read_item(difference[1], depth + 1)
        return _without(holes.items if isinstance(holes, Seq) else (holes,))
    ratio = split(tokens, {":"})
    if len(ratio) > 1:
        return Seq("ratio", tuple(Parser(part, depth).whole() for part in ratio))
    return _based(tokens) or _bracketed(tokens, depth) or Parser(tokens, depth).whole()


def _relation(tokens: list[Token], depth: int):
    """The value of a relation or a chain of relations. Raises Unreadable for other forms."""
    parts = split(tokens, RELATIONS)
    level, ops = 0, []
    for token in tokens:
        level += token.kind == "op" and (token.text in OPEN) - (token.text in CLOSE)
        if token.kind == "op" and token.text in RELATIONS and level == 0:
            ops.append(token.text)
    if set(ops) == {"="}:
        if not parts[0] and len(parts) == 2:
            return read_item(parts[1], depth + 1)  # "= 5"
        names = [_left_name(part) for part in parts]
        if names[0] and len(parts) == 2:
            return Assign(names[0], read_item(parts[1], depth + 1), len(parts[0]) > 2)
        if names[-1] and len(parts) == 2:
            return Assign(names[-1], read_item(parts[0], depth + 1), len(parts[-1]) > 2)
        sides = [Parser(part, depth).whole() for part in (parts[1:] if names[0] else parts)]
        if len(parts) == 2 and any(symbols(side) for side in sides):
            return Relation("=", sides[0], sides[1])
        if not all(equal(sides[0], side) for side in sides[1:]):
            raise Unreadable("a chain of equalities that does not hold")
        return Assign(names[0], sides[-1]) if names[0] else sides[-1]
    sides = [Parser(part, depth).whole() for part in parts]
    if len(sides) == 2:
        left, op, right = sides[0], ops[0], sides[1]
        if right[0] == "s" and left[0] != "s" or (op in (">", r"\ge") and left[0] != "s"):
            left, op, right = right, FLIP.get(op, op), left
        if left[0] == "s" and not symbols(right):
            return _ray(left[1], op, right)
        return Relation(FLIP[op], right, left) if op in (">", r"\ge") else Relation(op, left, right)
    if (
        len(sides) == 3
        and sides[1][0] == "s"
        and (set(ops) <= {"<", r"\le"} or set(ops) <= {">", r"\ge"})
    ):
        (low, first), (high, second) = (sides[0], ops[0]), (sides[2], ops[1])
        if ops[0] in (">", r"\ge"):
            low, first, high, second = high, FLIP[second], low, FLIP[first]
        return Intervals(((low, first == "<", high, second == "<"),), sides[1][1])
    raise Unreadable("a chain of relations of unknown form")


def _left_name(tokens: list[Token]) -> str:
    """The name that a left side such as x, f(x), (x,y) or x_1 assigns to, or ""."""
    texts = [token.text for token in tokens]
    if not tokens or tokens[0].kind != "sym" and texts[0] != "(":
        return ""
    if (
        tokens[0].kind == "sym"
        and len(tokens) == 1
        or (len(tokens) == 4 and texts[1] == "(" and texts[3] == ")" and tokens[2].kind == "sym")
    ):
        return texts[0]
    if (
        texts[0] == "("
        and texts[-1] == ")"
        and all(t.kind == "sym" or t.text in ("(", ",", ")") for t in tokens)
    ):
        return "".join(texts)
    subscript = "".join(texts[1:]).strip("_{}")
    return (
        f"{texts[0]}_{subscript}"
        if texts[1] == "_" and len(tokens) <= 5 and subscript.isalnum()
        else ""
    )


def _ray(name: str, op: str, bound: Expr) -> Intervals:
    """The solutions of `name op bound` as intervals."""
    if op == r"\ne":
        return Intervals(_without((bound,)).parts, name)
    if op in ("<", r"\le"):
        return Intervals(((NEG_INF, True, bound, op == "<"),), name)
    return Intervals(((bound, op == ">", INF, True),), name)


def _without(points: Sequence[Expr]) -> Intervals:
    """The real numbers without these points."""
    ends = [NEG_INF, *sorted(points, key=lambda point: float(evaluate(point).real)), INF]
    return Intervals(
        tuple((low, True, high, True) for low, high in zip(ends, ends[1:], strict=False))
    )


def as_intervals(value) -> Intervals | None:
    """The value as intervals, or None if it cannot be read so.

    A tuple of two members in round or square brackets is read as one interval.
    """
    if isinstance(value, Intervals):
        return value
    if (
        isinstance(value, Seq)
        and value.kind == "tuple"
        and len(value.items) == 2
        and value.brackets
    ):
        if set(value.brackets) <= set("()[]") and all(
            isinstance(item, tuple) for item in value.items
        ):
            low, high = value.items
            return Intervals(((low, value.brackets[0] == "(", high, value.brackets[1] == ")"),))
    return None


def _union(values: list):
    """The union of intervals, or of sets. Raises Unreadable for a mixture."""
    parts = [as_intervals(value) for value in values]
    if all(parts):
        return Intervals(tuple(part for value in parts for part in value.parts))
    if all(isinstance(value, Seq) and value.kind == "list" for value in values):
        return Seq("list", tuple(item for value in values for item in value.items))
    raise Unreadable("a union of things that are not sets")


def _based(tokens: list[Token]) -> Based | None:
    """The numeral of tokens such as 463_8 or 1A_{16}, or None if they have another form."""
    cut = next(
        (index for index, token in enumerate(tokens) if token.text == "_" and token.kind == "op"), 0
    )
    if any(token.kind not in ("num", "sym", "word") for token in tokens[:cut]) or len(
        tokens
    ) - cut not in (2, 4):
        return None
    digits = "".join(token.text for token in tokens[:cut]).upper()
    base = "".join(token.text for token in tokens[cut + 1 :]).strip("{}()")
    if not (
        cut
        and digits.isalnum()
        and digits.isascii()
        and base.isdigit()
        and 2 <= int(base[:3]) <= 36
    ):
        return None
    if not any(char.isdigit() for char in digits) and len(digits) < 2:
        return None
    if any(int(char, 36) >= int(base) for char in digits):
        raise Unreadable(f"a digit too large for base {base}")
    return Based(digits.lstrip("0") or "0", int(base))


def _bracketed(tokens: list[Token], depth: int):
    """The value of tokens within one pair of brackets: a set, a tuple, an interval or a matrix.

    None if the tokens are not one pair of brackets, or if these only group an expression.
    """
    if not tokens or tokens[0].kind != "op" or tokens[0].text not in OPEN:
        return (
            REALS
            if [token.text for token in tokens] == [r"\reals"]
            else (Seq("list", ()) if [token.text for token in tokens] == [r"\emptyset"] else None)
        )
    opening, closing, inner = tokens[0].text, tokens[-1].text, tokens[1:-1]
    if not _spans(tokens) or closing != OPEN[opening] and {opening, closing} - set("()[]"):
        return None
    if opening == "{":
        return read_list(inner, depth + 1) if len(split(inner, {","})) > 1 else None
    if opening == r"\mat":
        rows = [
            tuple(Parser(cell, depth).whole() for cell in split(row, {"&"}))
            for row in split(inner, {r"\row"})
            if row
        ]
        if len(rows) == 1:
            return Seq("tuple", rows[0]) if len(rows[0]) > 1 else rows[0][0]
        return Seq("tuple", tuple(Seq("tuple", row) for row in rows))
    if opening == r"\{":
        for bar in ("|", ":"):
            builder = split(inner, {bar})
            if len(builder) == 2 and builder[0] and builder[0][0].kind == "sym":
                return read_list(builder[1], depth + 1)
        value = read_list(inner, depth + 1) if inner else Seq("list", ())
        return value if isinstance(value, Seq) and value.kind == "list" else Seq("list", (value,))
    parts = split(inner, {",", ";"})
    if len(parts) == 1:
        if opening == "(" and closing == ")":
            inside = parts[0]
            return _bracketed(inside, depth + 1) if depth < MAX_DEPTH and inside else None
        if opening == "[" and closing == "]":
            value = read_item(parts[0], depth + 1)
            return value if isinstance(value, Seq) else None
        return None
    brackets = opening + closing if opening in ("(", "[") and closing in (")", "]") else ""
    return Seq("tuple", tuple(read_item(part, depth + 1) for part in parts), brackets)


def _spans(tokens: list[Token]) -> bool:
    """Whether the first bracket is closed by the last token."""
    level = 0
    for index, token in enumerate(tokens):
        if token.kind == "op":
            level += (token.text in OPEN) - (token.text in CLOSE)
            if level == 0:
                return index == len(tokens) - 1
    return False


def symbols_of(value) -> set[str]:
    """Names of the free symbols of any value; assigned names count, names of functions do not."""
    if isinstance(value, Assign):
        return symbols_of(value.value) | (set() if value.function else {value.name})
    if isinstance(value, Seq):
        return set().union(*map(symbols_of, value.items)) if value.items else set()
    if isinstance(value, Relation):
        return symbols(value.left) | symbols(value.right)
    if isinstance(value, Intervals):
        return {value.name} - {""}
    return symbols(value) if isinstance(value, tuple) else set()
