"""Reads the one value that a text states, and the words around it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from reward_service.math import units
from reward_service.math.extraction import MAX_ANSWER, gold_text, text_key
from reward_service.math.text import MONEY, Token, Unreadable, normalise, tokenise
from reward_service.math.value import read_list

_PUNCTUATION = set(".,:;!?/-()\"'*`")
_TRIG = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_LETTER_UNIT = re.compile(
    r"(?<=[\d})])(\s*)((?:[mshglLNJWVKCFA])(?:\s*\^\s*(?:\{-?[1-4]\}|[1-4]))?"
    r"(?:\s*/\s*(?:[mshlL]|kg)(?:\s*\^\s*(?:\{-?[1-4]\}|[1-4]))?)?)\s*\.?$"
)


@dataclass(frozen=True)
class Reading:
    """`value`: of mathvalue, or None with the reason in `problem`; `shown`: the tokens read; `words`: those beside
    them; `key`: the text itself for comparison as text."""

    key: str
    value: object = None
    problem: str = ""
    shown: str = ""
    words: tuple[str, ...] = ()
    hedges: frozenset[str] = frozenset()
    percent: bool = False
    unit_letter: Reading | None = None  # the same text with a last letter read as a unit: "5 m"
    spaced_letter: bool = False


def read(text: str) -> Reading:
    """The one value stated in `text`, or why there is none."""
    key = text_key(text)
    try:
        if len(text) > MAX_ANSWER:
            raise Unreadable(f"longer than {MAX_ANSWER} characters")
        plain = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", normalise(text))
        if any(ord(char) < 32 or char == "\x7f" for char in plain):
            raise Unreadable("control characters")
        if _TRIG.search(plain):
            plain = re.sub(r"\\deg(?![A-Za-z])", "°", plain)
        reading = _read_tokens(key, plain)
        lettered = _LETTER_UNIT.search(plain)
        if lettered and reading.value is not None:
            other = _read_tokens(key, f"{plain[: lettered.start()]} \\text{{{lettered.group(2)}}}")
            reading = Reading(
                **{**vars(reading), "unit_letter": other, "spaced_letter": bool(lettered.group(1))}
            )
        return reading
    except Unreadable as error:
        return Reading(key, problem=str(error))
    except RecursionError:
        return Reading(key, problem="too deeply nested to evaluate")


def _read_tokens(key: str, plain: str) -> Reading:
    tokens = tokenise(plain, units.known)
    hedges = frozenset(
        t.text.lower() for t in tokens if t.kind == "word" and t.text.lower() in units.HEDGES
    )
    math, words = _without_words(tokens)
    shown = f"{' '.join(t.text for t in math):.150}" + (
        f" (words: {' '.join(words):.80})" if words else ""
    )
    return Reading(
        key, read_list(math), "", shown, tuple(words), hedges, any(t.text == "%" for t in math)
    )


def _without_words(tokens: list[Token]) -> tuple[list[Token], list[str]]:
    """The tokens of the value, and the words around it. Raises Unreadable unless each list item states one thing."""
    while (
        tokens
        and tokens[-1].kind == "op"
        and tokens[-1].text in (*".,;:!", r"\row")
        and (tokens[-1].text != "!" or any(t.kind == "word" for t in tokens))
    ):
        tokens = tokens[:-1]
    if not any(token.kind == "word" or token.text in ".:" for token in tokens):
        return tokens, []
    for first, second in zip(tokens, tokens[1:], strict=False):
        if not second.spaced and (
            first.kind == "word"
            and second.text == "("
            or first.text == "."
            and second.kind in ("sym", "word")
        ):
            raise Unreadable("looks like code")
    math: list[Token] = []
    words: list[str] = []
    for part in _parts(tokens):
        runs, said = _runs(part)
        if len(runs) > 1:
            runs = [run for run in runs if not (len(run) == 1 and run[0].kind == "sym")]
        if len(runs) > 1:
            raise Unreadable("more than one value is stated")
        if (
            runs
            and len(runs[0]) == 1
            and runs[0][0].kind == "sym"
            and said
            and len(tokens) > 1 + len(said)
        ):
            runs = []
        if not runs and part[0].text == "or":
            raise Unreadable("an alternative that is no value")
        words += said
        if runs:
            math += (
                [part[0]] if math and part[0].text in ",;or" and part[0].kind == "op" else []
            ) + runs[0]
            if len(math) > len(runs[0]) and math[-len(runs[0]) - 1].text not in (",", ";", "or"):
                math.insert(len(math) - len(runs[0]), Token("op", ","))
    if not math:
        raise Unreadable("words only")
    return math, words


def _parts(tokens: list[Token]) -> list[list[Token]]:
    """List items at the top level, each beginning with its separator."""
    parts, depth = [[]], 0
    for token in tokens:
        if token.kind == "op":
            depth += token.text in ("(", "[", "{", r"\{", r"\mat", r"\langle")
            depth -= token.text in (")", "]", "}", r"\}", r"\endmat", r"\rangle")
            if depth == 0 and token.text in (",", ";", "or"):
                parts.append([])
        parts[-1].append(token)
    return [part for part in parts if part]


def _runs(part: list[Token]) -> tuple[list[list[Token]], list[str]]:
    runs: list[list[Token]] = [[]]
    said: list[str] = []
    for index, token in enumerate(part):
        stop = token.kind == "op" and (
            token.text in ".!?"
            and (token.text != "!" or index + 1 == len(part))
            or token.text in ",;or"
            and index == 0
        )
        if token.kind == "word":
            said.append(token.text)
        if token.kind == "word" or stop:
            if token.text not in MONEY or (runs[-1] and runs[-1][-1].text != "-"):
                runs.append([])
        else:
            runs[-1].append(token)
    trimmed = []
    for run in runs:
        while run and run[0].kind == "op" and run[0].text in (":", "=", ")", "]", ".", ","):
            run = run[1:]
        while (
            run
            and run[-1].kind == "op"
            and run[-1].text in (":", "=", "(", "[", "/", "-", "*", ".", ",")
        ):
            run = run[:-1]
        if any(token.kind in ("num", "sym", "fun") or token.text.startswith("\\") for token in run):
            trimmed.append(run)
        elif not {token.text for token in run} <= _PUNCTUATION:
            raise Unreadable("signs that belong to no value")
    return trimmed, said


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Reading:
    """Reading of a dataset's gold, parsed once."""
    return read(gold_text(gold))
