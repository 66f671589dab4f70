"""The value of an expression and equality of two, in exact fractions if the value is rational."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from mpmath import mp

from reward_service.math.expression import MAX_BITS, Expr, nodes, symbols
from reward_service.math.text import Unreadable

DIGITS, PROOF_DIGITS = 60, 1000
_RATIONAL = frozenset("n+-*/%!s")  # heads of expressions whose value is a fraction


class _Evaluator:
    """Evaluates expressions at one point, which maps the names of symbols to values.

    A value is a Fraction if it is exact, else an mpmath number of `digits` digits. The size of
    every number is bounded before it is computed. `extreme` is set once an intermediate value is so
    small or so large that agreeing digits would prove nothing.
    """

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
    """The integer root of that degree, or None if it is not an integer."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < value else (low, middle)
    return low if low**degree == value else None


def evaluate(expr: Expr, point: Mapping[str, Fraction] | None = None, digits: int = DIGITS) -> Any:
    """The value of `expr` at `point`: a Fraction if it is exact, else an mpmath number.

    Raises Unreadable if the value is undefined or too large to compute.
    """
    return evaluate_watched(expr, point or {}, digits)[0]


def evaluate_watched(expr: Expr, point: Mapping[str, Fraction], digits: int) -> tuple[Any, bool]:
    """(value, extreme): as `evaluate`.

    `extreme` says that an intermediate value was so small or so large that agreeing digits would
    prove nothing.
    """
    evaluator = _Evaluator(digits, point)
    if all(node[0] in _RATIONAL for node in nodes(expr)):
        return _guarded(evaluator, expr), False
    with mp.workdps(digits + 15):
        return +_guarded(evaluator, expr), evaluator.extreme


def _guarded(evaluator: _Evaluator, expr: Expr) -> Any:
    """The evaluated expression; errors of arithmetic are raised as Unreadable."""
    try:
        return evaluator.of(expr)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("too long to evaluate") from None
    except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
        raise Unreadable(f"cannot be evaluated: {error}") from error


def equal(left: Expr, right: Expr) -> bool:
    """Whether two expressions are equal.

    Rational values are compared as fractions. Other values must agree to PROOF_DIGITS digits, with
    no intermediate value so small or so large that a difference could hide beyond these digits.
    Expressions with symbols must agree at random rational points; points where one of them is not
    real are left out.
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
    """left / right if it is the same rational number at every point tried, else None."""
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
