"""From tokens to expressions: a strict parser that reads all tokens or raises Unreadable."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from reward_service.math.expression import MAX_DEPTH, MAX_DIGITS, MAX_TOKENS, Expr
from reward_service.math.text import Token, Unreadable

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


def integer(digits: str) -> int:
    """int(digits) without Python's limit on the number of digits; long strings are halved."""
    if len(digits) <= 4000:
        return int(digits)
    half = len(digits) // 2
    return integer(digits[:-half]) * 10**half + integer(digits[-half:])


def number(text: str) -> Fraction:
    """The exact value of a decimal numeral such as 12, .5 or 3.2e-4.

    Raises Unreadable for more than MAX_DIGITS digits.
    """
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    power = int(exponent) if 0 < len(exponent) < 8 else 0
    if len(text) > MAX_DIGITS or len(exponent) >= 8 or abs(power) > MAX_DIGITS:
        raise Unreadable("number too large to evaluate")
    scale = power - len(decimals)
    value = Fraction(integer(whole + decimals or "0"))
    return value * 10**scale if scale >= 0 else value / 10**-scale


class Parser:
    """A recursive-descent parser. `whole()` reads all tokens or raises Unreadable.

    The other methods read one construct of the grammar each, beginning at token `at`.
    """

    def __init__(self, tokens: Sequence[Token], depth: int = 0):
        if len(tokens) > MAX_TOKENS:
            raise Unreadable("too long to evaluate")
        self.tokens, self.at, self.depth = list(tokens), 0, depth

    def whole(self) -> Expr:
        """The expression of all tokens. Raises Unreadable if they do not form exactly one."""
        value = self.sum()
        if self.at != len(self.tokens):
            raise Unreadable(f"cannot read {self.tokens[self.at].text!r} here")
        return value

    def peek(self) -> Token:
        """The next token, which stays unread; a token of kind "end" after the last one."""
        return self.tokens[self.at] if self.at < len(self.tokens) else Token("end", "")

    def accept(self, *texts: str) -> str:
        """Reads the next token if it is one of these operators, and returns its text; else ""."""
        token = self.peek()
        if token.kind != "op" or token.text not in texts:
            return ""
        self.at += 1
        return token.text

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

    def _times_sign(self) -> bool:
        """Whether the next token is an x that multiplies, as in 2.5 x 10^5."""
        here = self.tokens[self.at - 1 : self.at + 2]
        return (
            len(here) == 3
            and here[1].text == "x"
            and here[0].kind == here[2].kind == "num"
            and here[2].text == "10"
        )

    def _starts_atom(self) -> bool:
        """Whether the next token begins a factor that follows without a multiplication sign."""
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
        """A decimal with repeating digits: 0.1\\overline{6}."""
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
        """The fraction of a mixed number such as 3 1/2, if one follows the whole number."""
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
        """The argument of \\frac or \\binom: a group, or a single token or digit."""
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
