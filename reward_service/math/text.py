"""From answer text to tokens: the Unicode and LaTeX spellings of a sign become the same token.

The running time is linear in the length of the text.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

FUNCTIONS = {
    "sqrt",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
    "arctan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "log",
    "ln",
    "lg",
    "exp",
    "abs",
    "floor",
    "ceil",
    "frac",
    "binom",
}
SEPARATORS = {
    "and": ",",
    "or": "or",
    "和": ",",
    "及": ",",
    "与": ",",
    "或": "or",
    "와": ",",
    "및": ",",
    "또는": "or",
}
PERCENT_WORDS = {"percent", "pct", "퍼센트", "프로"}

_CHARS = {
    **dict.fromkeys("−‐‑‒–—﹣－", "-"),
    **dict.fromkeys("×✕⋅·∙∗", "*"),
    **dict.fromkeys("÷⁄∕", "/"),
    "、": ",",
    "。": ".",
    "％": "%",
    "﹪": "%",
    "°": r"^\circ ",
    "℃": r"^\circ C",
    "℉": r"^\circ F",
    "π": r"\pi ",
    "∞": r"\infty ",
    "√": r"\sqrt ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "≈": r"\approx ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "′": "'",
    "\t": " ",
    "\n": " ",
    "\r": " ",
    "∖": r"\setminus ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "¥": "¥",
    "￥": "¥",
    "…": r"\dots ",
}
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\\\(?:\[[^\]]*\])?", r"\\row "),
        (r"\\begin\s*\{(?:[a-zA-Z]*matrix\*?|array\}\s*\{[^{}]*)\}", r"\\mat "),
        (r"\\end\s*\{(?:[a-zA-Z]*matrix\*?|array)\}", r"\\endmat "),
        (r"(?<![\w)*])\*\*(?=[^\s*])([^*]+)\*\*(?![\w(*])", r"\1"),  # Markdown bold
        (r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))", ","),
        (r"\\\$", " ¤"),
        (
            r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|nolimits|mathstrut"
            r"|phantom\{\})(?![A-Za-z])\.?",
            "",
        ),
        (r"\\!", ""),
        (
            r"\\[,;:> ]|\\(?:quad|qquad|enspace|thinspace|hfill|newline)(?![A-Za-z])"
            r"|\\hspace\{[^{}]*\}|(?<!^)~",
            " ",
        ),
        (r"\\([%#&_])", r"\1"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\(?:infin|inf)(?![A-Za-z])", r"\\infty "),
        (r"\\(?:bar|dot)\{(\d+)\}", r"\\overline{\1}"),
        (
            r"\^\s*\{\s*(?:\\circ|\\degree|o)\s*\}|\^\s*\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z])",
            r" \\deg ",
        ),
        (r"\\[lr][vV]ert(?![A-Za-z])|\\[vV]ert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset "),
        (r"\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"\\mathbb\s*\{?R\}?|\\R(?![A-Za-z])", r"\\reals "),
        (r"\*\*", "^"),
        (r"(?i)\bper\s+cent\b", "percent"),
    )
]


def _character(char: str) -> str:
    if char < "\x7f":
        return " " if char in ("\t", "\n", "\r") else char
    if char in _CHARS:
        return _CHARS[char]
    code, category = ord(char), unicodedata.category(char)
    if 0xFF01 <= code <= 0xFF5E:
        return chr(code - 0xFEE0)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category == "No" and "⁄" in unicodedata.normalize("NFKD", char):
        top, _, bottom = unicodedata.normalize("NFKD", char).partition("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}" if top and bottom else char
    if category in ("Zs", "Zl", "Zp", "Cf"):
        return " "  # a zero-width character must not glue two digits together
    name = unicodedata.name(char, "")
    if name.startswith(("GREEK SMALL LETTER ", "GREEK CAPITAL LETTER ")) and name.count(" ") == 3:
        letter = name.rpartition(" ")[2].lower()
        return "\\" + (letter if "SMALL" in name else letter.capitalize()) + " "
    return char


def _scripts(text: str, table: dict[str, str], mark: str) -> str:
    return re.sub(
        f"[{''.join(table)}]+", lambda m: f"{mark}{{{''.join(table[c] for c in m.group())}}}", text
    )


def normalise(text: str) -> str:
    """The text with one spelling for each sign and without math delimiters.

    A dollar sign that stands for money becomes ¤.
    """
    if not text.isascii():
        text = _scripts(_scripts(text, _SUPER, "^"), _SUB, "_")
        text = "".join(map(_character, text))
    else:
        text = text.translate({9: " ", 10: " ", 13: " "})
    if any(sign in text for sign in "\\*=~{") or "cent" in text:
        for pattern, new in _SPELLINGS:
            text = pattern.sub(new, text)
        text = re.sub(r"\\[\[\]()]", " ", text)
    if "base" in text or "_" in text:
        text = _BASE.sub(
            lambda m: (
                f"_{{{_BASE_WORDS.get(m[1], m[1])}}}"
                if m[1].isdigit() or m[1] in _BASE_WORDS
                else m[0]
            ),
            text,
        )
    if text.count("$") % 2:
        text = re.sub(r"\$(?=\s*-?[\d.])", "¤", text, count=1)
    return text.replace("$", " ").strip()


@dataclass(frozen=True, slots=True)
class Token:
    """One token. `kind` is num, sym, fun, word or op; `spaced`: white space precedes it."""

    kind: str
    text: str
    spaced: bool = False


class Unreadable(ValueError):
    """The text is not exactly one value of the grammar. The message gives the reason."""


_NUMBER = (
    r"(?:(?<!\d,)[1-9]\d{0,2}(?:,\d{3})+(?:(?![,.]?\d)|(?=\.\d))|\d+)"
    r"(?:\.\d+|\.(?=\\overline))?|\.\d+"
)
_SCAN = re.compile(
    rf"(?P<space>\s+)|(?P<num>(?:{_NUMBER})(?:[eE][+-]?\d+(?![\w.]))?)|(?P<name>[A-Za-z]+)"
    r"|(?P<text>\\(?:text|textbf|textit|textrm|textsf|texttt|mbox|mathrm|mathbf|mathsf|mathit"
    r"|bf|rm|operatorname)(?![A-Za-z])\*?\s*\{)|"
    r"(?P<command>\\[A-Za-z]+|\\.)|(?P<foreign>[^\W\d_]+)|(?P<op>.)",
    re.DOTALL,
)
_SMALL_POWER = re.compile(r"\s*\^\s*(?:\{\s*(-?\d)\s*\}|(-?\d))(?!\d)|(?<=[cmkd]m|ft)([23])(?!\d)")
_PER = re.compile(r"\s*/\s*([smhlLg](?:\^\{?[1-4]\}?)?)(?![A-Za-z(])")
_BASE = re.compile(
    r"(?<=[\dA-Fa-f])\s*(?:_\s*\{?\s*\\text\{\s*|_\{\s*|(?:in\s+)?base[\s-]*)"
    r"(\d+|[a-z]+)(?:\s*\}){0,2}"
)
_BASE_WORDS = {
    word: str(base)
    for base, word in enumerate(
        "two three four five six seven eight nine ten eleven twelve "
        "thirteen fourteen fifteen sixteen".split(),
        2,
    )
}
_CONSTANTS = {
    "pi": r"\pi",
    "inf": r"\infty",
    "infty": r"\infty",
    "infinity": r"\infty",
    "Infinity": r"\infty",
}
MONEY = frozenset("¤€£¥₩₹")


def closing_brace(text: str, start: int) -> int:
    """Index of the } that closes the { just before `start`, or -1 if there is none."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (match.group() == "{") - (match.group() == "}")
        if depth == 0:
            return match.start()
    return -1


def tokenise(text: str, is_unit, prose: bool = False) -> list[Token]:
    """The tokens of a normalised text.

    `is_unit(word)` says whether letters are a known word instead of a product of variables. With
    `prose`, as inside of \\text{}, letters always form words. Raises Unreadable for unbalanced
    braces.
    """
    out: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _SCAN.match(text, position)
        kind, matched = match.lastgroup, match.group()
        position = match.end()
        if kind == "space":
            spaced = True
            continue
        if kind == "text":
            end = closing_brace(text, position)
            if end < 0:
                raise Unreadable("unbalanced braces")
            inner = text[position:end]
            single = inner.strip() in ("e", "i") and matched.startswith(r"\mathrm")
            out += tokenise(inner, is_unit, prose=not single and inner.strip() not in FUNCTIONS)
            position, spaced = end + 1, True
        elif kind == "name":
            out += _name_tokens(matched, spaced, prose, is_unit, out, text[position : position + 1])
        elif kind == "foreign":
            separator = SEPARATORS.get(matched)
            percent = matched in PERCENT_WORDS
            out.append(
                Token("op", separator, True)
                if separator
                else Token("op", "%")
                if percent
                else Token("word", matched, spaced)
            )
        elif kind == "command":
            out.append(_command(matched, spaced))
        elif kind == "num":
            out.append(Token("num", matched.replace(",", ""), spaced))
        else:
            out.append(Token("word" if matched in MONEY else "op", matched, spaced))
        if out and out[-1].kind == "word":
            power = _SMALL_POWER.match(text, position)
            if power and out[-1].text not in MONEY:
                digits = next(filter(None, power.groups()))
                out[-1] = Token("word", f"{out[-1].text}^{digits}", out[-1].spaced)
                position = power.end()
            per = _PER.match(text, position)
            if per and is_unit(out[-1].text.partition("^")[0]):
                out.append(Token("word", per.group(1)))
                position = per.end()
        spaced = False
    return out


def _command(matched: str, spaced: bool) -> Token:
    name = matched[1:]
    if name == "deg":
        return Token("word", "degree", spaced)
    if name in FUNCTIONS or name in ("overline",):
        return Token("fun", name, spaced)
    greek = name.isalpha() and name.lower() in _GREEK
    return Token("sym" if greek else "op", matched, spaced)


_GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi omicron "
    "rho sigma tau upsilon phi varphi chi psi omega".split()
)


def _name_tokens(
    name: str, spaced: bool, prose: bool, is_unit, before: list[Token], after: str
) -> list[Token]:
    lower = name.lower()
    if lower in SEPARATORS:
        return [Token("op", SEPARATORS[lower], True)]
    if lower in PERCENT_WORDS:
        return [Token("op", "%", spaced)]
    if not prose or name in _CONSTANTS:
        if name in FUNCTIONS:
            return [Token("fun", name, spaced)]
        if name in _CONSTANTS:
            return [Token("op", _CONSTANTS[name], spaced)]
    if prose:
        return [Token("word", name, spaced)]
    if len(name) == 1:
        return [Token("sym", name, spaced)]
    if name[-1] in ("x", "y") and name[:-1] in FUNCTIONS:  # sinx
        return [Token("fun", name[:-1], spaced), Token("sym", name[-1])]
    if len(name) > 3 or is_unit(name):
        return [Token("word", name, spaced)]
    glued = (
        bool(before)
        and not spaced
        and before[-1].kind != "word"
        and before[-1].text not in (".", ":", ",")
    )
    touches = after in ("^", "_", "(", "+", "*", "/", "=")
    if glued or touches or not set(lower) & set("aeiou"):
        return [Token("sym", letter, spaced and index == 0) for index, letter in enumerate(name)]
    return [Token("word", name, spaced)]
