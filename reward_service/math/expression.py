"""Expressions: a strict parser and a bounded evaluator, exact in fractions wherever the value is rational.

Expressions are nested tuples: ("n", Fraction), ("s", name), ("c", "pi" | "e" | "i" | "inf"), ("+", a, b), ("*", a, b),
("/", a, b), ("^", a, b), ("-", a), ("!", a), ("%", a), ("f", name, a, ...).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from mpmath import mp

from reward_service.math.text import Token, Unreadable

Expr = tuple
MAX_DEPTH, MAX_TOKENS, MAX_DIGITS, MAX_BITS = 60, 4000, 20_000, 200_000
OPEN = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\{": r"\}",
    r"\langle": r"\rangle",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
    r"\mat": r"\endmat",
}
CLOSE = set(OPEN.values())
CONSTANTS = {r"\pi": ("c", "pi"), r"\infty": ("c", "inf")}
DEGREE = ("/", ("c", "pi"), ("n", Fraction(180)))
DIGITS, PROOF_DIGITS = 60, 1000


def integer(digits: str) -> int:
    """int(digits) without Python's limit on the number of digits, in halves."""
    if len(digits) <= 4000:
        return int(digits)
    half = len(digits) // 2
    return integer(digits[:-half]) * 10**half + integer(digits[-half:])


def number(text: str) -> Fraction:
    """Exact value of a decimal numeral such as 12, .5, 3.2e-4. Raises Unreadable past MAX_DIGITS."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    power = int(exponent) if 0 < len(exponent) < 8 else 0
    if len(text) > MAX_DIGITS or len(exponent) >= 8 or abs(power) > MAX_DIGITS:
        raise Unreadable("number too large to evaluate")
    scale = power - len(decimals)
    value = Fraction(integer(whole + decimals or "0"))
    return value * 10**scale if scale >= 0 else value / 10**-scale


class Parser:
    """Recursive descent over tokens; `whole()` reads all of them or raises Unreadable."""

    def __init__(self, tokens: Sequence[Token], depth: int = 0):
        if len(tokens) > MAX_TOKENS:
            raise Unreadable("too long to evaluate")
        self.tokens, self.at, self.depth = list(tokens), 0, depth

    def whole(self) -> Expr:
        value = self.sum()
        if self.at != len(self.tokens):
            raise Unreadable(f"cannot read {self.tokens[self.at].text!r} here")
        return value

    def peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else Token("end", "")

    def accept(self, *texts: str) -> str:
        token = self.peek()
        found = token.kind == "op" and token.text in texts
        self.at += found
        return token.text if found else ""

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deeply nested to evaluate")

    def sum(self) -> Expr:
        self._deeper()
        value = self.product()
        while sign := self.accept("+", "-"):
            term = self.product()
            value = ("+", value, term if sign == "+" else ("-", term))
        self.depth -= 1
        return value

    def product(self) -> Expr:
        value = self.signed()
        while True:
            if sign := self.accept("*", "/"):
                value = (sign, value, self.signed())
            elif self._times_sign():
                self.at += 1
                value = ("*", value, self.signed())
            elif self._starts_atom():
                value = ("*", value, self.power())
            else:
                return value

    def _times_sign(self) -> bool:  # 2.5 x 10^5
        here = self.tokens[self.at - 1 : self.at + 2]
        return (
            len(here) == 3
            and here[1].text == "x"
            and here[0].kind == here[2].kind == "num"
            and here[2].text == "10"
        )

    def _starts_atom(self) -> bool:
        token = self.peek()
        if token.kind == "op":
            return token.text in CONSTANTS or token.text in ("(", r"\lfloor", r"\lceil")
        return token.kind in ("sym", "fun") and token.text != "overline"

    def signed(self) -> Expr:
        negative, count = False, 0
        while sign := self.accept("-", "+"):
            negative, count = negative ^ (sign == "-"), count + 1
        if count > 1:
            raise Unreadable("a run of signs")
        value = self.power()
        return ("-", value) if negative else value

    def power(self) -> Expr:
        base = self.postfix(self.atom())
        if self.accept("^"):
            base = self.postfix(("^", base, self.exponent()))
            if self.peek().text == "^":
                raise Unreadable("ambiguous tower of powers")
        return base

    def exponent(self) -> Expr:
        if self.peek().text == "{":
            return self.atom()
        self._deeper()
        negative = bool(self.accept("-"))
        value = self.atom()
        if self.accept("^"):
            value = ("^", value, self.exponent())
        self.depth -= 1
        return ("-", value) if negative else value

    def postfix(self, value: Expr) -> Expr:
        while mark := self.accept("!", "%", "°"):
            value = (mark, value) if mark != "°" else ("*", value, DEGREE)
        return value

    def atom(self) -> Expr:
        token = self.peek()
        self.at += 1
        if token.kind == "num":
            return self._numeral(token)
        if token.kind == "sym":
            return self._symbol(token)
        if token.kind == "fun":
            return self._function(token.text)
        if token.text in CONSTANTS:
            return CONSTANTS[token.text]
        if token.text in ("(", "{", "["):
            return self._until(OPEN[token.text])
        if token.text in (r"\lfloor", r"\lceil"):
            return (
                "f",
                "floor" if token.text == r"\lfloor" else "ceil",
                self._until(OPEN[token.text]),
            )
        if token.text == "|":
            return ("f", "abs", self._until("|"))
        raise Unreadable(f"cannot read {token.text!r} here" if token.text else "ends too early")

    def _until(self, closing: str) -> Expr:
        value = self.sum()
        if not self.accept(closing):
            raise Unreadable(f"{closing!r} is missing")
        return value

    def _numeral(self, token: Token) -> Expr:
        value = number(token.text)
        following = [after.text for after in self.tokens[self.at : self.at + 4]]
        if following[:1] == ["overline"]:
            return self._repeating(token.text, following)
        if token.text.isdigit():
            part = self._mixed_part()
            if part is not None:
                return ("n", value + part)
        if self.peek().kind == "num":
            raise Unreadable("two numbers side by side")
        return ("n", value)

    def _repeating(self, text: str, following: list[str]) -> Expr:
        if "." not in text:
            raise Unreadable("overline after an integer")
        braced = len(following) == 4 and following[1::2] == ["{", "}"]
        digits = following[2] if braced else "".join(following[1:2])
        if not digits.isdigit() or len(digits) > 50:
            raise Unreadable("overline over something that is not digits")
        self.at += 4 if braced else 2
        places = len(text.partition(".")[2])
        return ("n", number(text) + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))

    def _mixed_part(self) -> Fraction | None:
        ahead = self.tokens[self.at : self.at + 7]
        texts = [token.text for token in ahead]
        if (
            texts[:1] == ["frac"]
            and texts[1:2] == ["{"]
            and texts[3:5] == ["}", "{"]
            and texts[6:7] == ["}"]
        ):
            top, bottom, used = texts[2], texts[5], 7
        elif texts[:1] == ["frac"] and len(texts) > 1 and texts[1].isdigit() and len(texts[1]) == 2:
            top, bottom, used = texts[1][0], texts[1][1], 2
        elif (
            len(texts) > 2
            and texts[1] == "/"
            and ahead[0].kind == ahead[2].kind == "num"
            and ahead[0].spaced
        ):
            top, bottom, used = texts[0], texts[2], 3
        else:
            return None
        if not (
            top.isdigit() and bottom.isdigit() and 0 < integer(top[:50]) < integer(bottom[:50])
        ):
            return None
        self.at += used
        return Fraction(int(top), int(bottom))

    def _symbol(self, token: Token) -> Expr:
        name = token.text
        if self.peek().text == "_":
            self.at += 1
            braced = bool(self.accept("{"))
            parts = []
            while (
                (part := self.peek()).kind in ("num", "sym")
                and len(parts) < 5
                and (braced or not parts)
            ):
                parts.append(part.text)
                self.at += 1
            if not parts or (braced and not self.accept("}")):
                raise Unreadable("subscript of unknown form")
            return ("s", name + "_" + "".join(parts))
        while self.accept("'"):
            name += "'"
        return ("c", name) if name in ("e", "i") else ("s", name)

    def _argument(self) -> Expr:
        """Argument of \\frac or \\sqrt: a group, or one token (one digit of a numeral)."""
        token = self.peek()
        if token.kind != "num" or not token.text.isdigit():
            return self.atom()
        self.tokens[self.at : self.at + 1] = [
            Token("num", digit) for digit in (token.text[0], token.text[1:]) if digit
        ]
        self.at += 1
        return ("n", Fraction(int(token.text[0])))

    def _function(self, name: str) -> Expr:
        if name == "frac":
            return ("/", self._argument(), self._argument())
        if name == "binom":
            return ("f", name, self._argument(), self._argument())
        if name == "sqrt":
            index = self._until("]") if self.accept("[") else ("n", Fraction(2))
            return ("^", self.atom(), ("/", ("n", Fraction(1)), index))
        if name == "overline":
            raise Unreadable("overline of unknown form")
        base = self._argument() if name == "log" and self.accept("_") else None
        power = self.exponent() if self.accept("^") else None
        if self.peek().text in ("(", "{", "|"):
            argument = self.atom()
        else:
            argument = self.power()
            while self._starts_atom() and self.peek().kind != "fun":
                argument = ("*", argument, self.power())
        value = (
            ("f", name, argument)
            if base is None
            else ("/", ("f", "ln", argument), ("f", "ln", base))
        )
        if power == ("-", ("n", Fraction(1))):
            return ("f", "arc" + name, argument)
        return value if power is None else ("^", value, power)


def nodes(expr: Expr) -> Iterator[Expr]:
    """Every sub-expression."""
    stack = [expr]
    while stack:
        node = stack.pop()
        yield node
        stack += [child for child in node[1:] if isinstance(child, tuple)]


def symbols(expr: Expr) -> set[str]:
    """Names of the free symbols."""
    return {node[1] for node in nodes(expr) if node[0] == "s"}


class _Evaluator:
    """Value at a point: a Fraction where exact, else an mpmath number of `digits` digits. All sizes are bounded."""

    def __init__(self, digits: int, point: Mapping[str, Fraction]):
        self.digits, self.point, self.extreme = digits, point, False

    def real(self, value: Any) -> Any:
        if not isinstance(value, Fraction):
            return value
        result = mp.mpf(value.numerator) / value.denominator
        self._watch(result)
        return result

    def _watch(self, value: Any) -> Any:
        if not mp.isfinite(value):
            raise Unreadable("undefined")
        if value and not -1300 < mp.mag(value) < 1300:
            self.extreme = True
        return value

    def of(self, expr: Expr) -> Any:
        head = expr[0]
        if head == "n":
            return expr[1]
        if head == "s":
            return self.point[expr[1]]
        if head == "c":
            return self._constant(expr[1])
        if head == "f":
            return self._function(expr[1], [self.of(child) for child in expr[2:]])
        if head == "!":
            return Fraction(math.factorial(self._natural(self.of(expr[1]), 3000)))
        left = self.of(expr[1])
        if head == "-":
            return -left
        if head == "%":
            return left / 100
        return self._binary(head, left, self.of(expr[2]))

    def _constant(self, name: str) -> Any:
        if name == "inf":
            raise Unreadable("infinity inside an expression")
        return {"pi": lambda: +mp.pi, "e": lambda: +mp.e, "i": lambda: mp.mpc(0, 1)}[name]()

    def _natural(self, value: Any, most: int) -> int:
        if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= most:
            raise Unreadable("factorial or binomial too large, or not of a whole number")
        return int(value)

    def _binary(self, head: str, left: Any, right: Any) -> Any:
        if head == "^":
            return self._power(left, right)
        exact = isinstance(left, Fraction) and isinstance(right, Fraction)
        if (
            exact
            and max(x.bit_length() for f in (left, right) for x in (f.numerator, f.denominator))
            > MAX_BITS
        ):
            raise Unreadable("number too large to evaluate")
        if not exact:
            left, right = self.real(left), self.real(right)
        if head == "/" and right == 0:
            raise Unreadable("division by zero")
        value = left + right if head == "+" else left * right if head == "*" else left / right
        return value if exact else self._watch(value)

    def _power(self, base: Any, power: Any) -> Any:
        if isinstance(base, Fraction) and isinstance(power, Fraction):
            exact = self._exact_power(base, power)
            if exact is not None:
                return exact
        base, power = self.real(base), self.real(power)
        if base == 0:
            raise Unreadable("undefined power of zero")
        if abs(power) > 100_000 or abs(mp.mag(base)) * abs(power) > MAX_BITS * 10:
            raise Unreadable("power too large to evaluate")
        return self._watch(mp.power(base, power))

    def _exact_power(self, base: Fraction, power: Fraction) -> Fraction | None:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(power) * bits > MAX_BITS and base not in (0, 1, -1):
            raise Unreadable("power too large to evaluate")
        if base == 0 and power <= 0:
            raise Unreadable("undefined power of zero")
        if power.denominator == 1:
            return base ** int(power) if abs(base) != 1 else (base if power % 2 else Fraction(1))
        if base < 0 or power.denominator > 64:
            return None
        roots = [_root(part, power.denominator) for part in (base.numerator, base.denominator)]
        return None if None in roots else Fraction(*roots) ** power.numerator

    def _function(self, name: str, values: list[Any]) -> Any:
        value = values[0]
        if name == "binom":
            n, k = self._natural(value, 3000), self._natural(values[1], 3000)
            return Fraction(math.comb(n, k))
        if name in ("abs", "floor", "ceil") and isinstance(value, Fraction):
            return {"abs": abs, "floor": math.floor, "ceil": math.ceil}[name](value) * Fraction(1)
        value = self.real(value)
        if mp.mag(value) > 18 and name not in ("ln", "log", "lg", "abs"):
            raise Unreadable("argument too large to evaluate")
        name = {"lg": "log10", "abs": "fabs", "log": "log10"}.get(name, name)
        name = "a" + name[3:] if name.startswith("arc") else name
        function = getattr(mp, name, None)
        if function is None:
            raise Unreadable(f"unknown function {name}")
        if value == 0 and name in ("ln", "log10", "cot", "csc"):
            raise Unreadable("undefined")
        return self._watch(function(value))


def _root(value: int, degree: int) -> int | None:
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < value else (low, middle)
    return low if low**degree == value else None


def evaluate(expr: Expr, point: Mapping[str, Fraction] | None = None, digits: int = DIGITS) -> Any:
    """Value of `expr`: a Fraction if exact, else an mpmath number. Raises Unreadable if undefined or too large."""
    return evaluate_watched(expr, point or {}, digits)[0]


def evaluate_watched(expr: Expr, point: Mapping[str, Fraction], digits: int) -> tuple[Any, bool]:
    """(value, whether an intermediate was so small or large that agreeing digits would prove nothing)."""
    evaluator = _Evaluator(digits, point)
    if all(node[0] in "n+-*/%!s" for node in nodes(expr)):
        return _guarded(evaluator, expr), False
    with mp.workdps(digits + 15):
        return +_guarded(evaluator, expr), evaluator.extreme


def _guarded(evaluator: _Evaluator, expr: Expr) -> Any:
    try:
        return evaluator.of(expr)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("too long to evaluate") from None
    except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
        raise Unreadable(f"cannot be evaluated: {error}") from error


def equal(left: Expr, right: Expr) -> bool:
    """Exact equality of two expressions; of ones with symbols, as functions (at points where both are real).

    Rational values are compared as fractions. Others must agree to PROOF_DIGITS digits, with no intermediate value so
    small or so large that a difference could hide beyond them.
    """
    if left == right:
        return True
    if any(side in (("c", "inf"), ("-", ("c", "inf"))) for side in (left, right)):
        return False
    names = sorted(symbols(left) | symbols(right))
    if not names:
        return _same(left, right, {})
    draw, agreed = random.Random(20261130), 0
    for trial in range(8):
        sign = -1 if trial % 2 else 1
        point = {name: sign * Fraction(draw.randint(10**4, 10**6), 10**5 + 3) for name in names}
        try:
            values = [evaluate(side, point) for side in (left, right)]
        except Unreadable:
            continue
        if all(isinstance(value, Fraction) or not value.imag for value in values):
            if not _same(left, right, point):
                return False
            agreed += 1
        if agreed == 4:
            return True
    return agreed >= 2


def constant_ratio(left: Expr, right: Expr) -> Fraction | None:
    """left / right if it is one rational constant at every point tried, else None."""
    names, draw, ratios = sorted(symbols(left) | symbols(right)), random.Random(7), set()
    for _ in range(4):
        point = {name: Fraction(draw.randint(10**4, 10**6), 10**5 + 3) for name in names}
        try:
            values = [evaluate(side, point) for side in (left, right)]
        except Unreadable:
            continue
        if not all(isinstance(value, Fraction) for value in values) or not all(values):
            return None
        ratios.add(values[0] / values[1])
    return ratios.pop() if len(ratios) == 1 else None


def _same(left: Expr, right: Expr, point: Mapping[str, Fraction]) -> bool:
    first, second = evaluate(left, point), evaluate(right, point)
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    if not _close(first, second, DIGITS):
        return False
    pairs = [evaluate_watched(side, point, PROOF_DIGITS) for side in (left, right)]
    return not any(extreme for _, extreme in pairs) and _close(
        pairs[0][0], pairs[1][0], PROOF_DIGITS
    )


def _close(first: Any, second: Any, digits: int) -> bool:
    with mp.workdps(digits + 15):
        first, second = (
            mp.mpf(v.numerator) / v.denominator if isinstance(v, Fraction) else v
            for v in (first, second)
        )
        return bool(abs(first - second) <= mp.mpf(10) ** -digits * max(abs(first), abs(second), 1))
