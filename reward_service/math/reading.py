"""Reads the one value that a text states, and the words around it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from reward_service.math import units
from reward_service.math.extraction import MAX_ANSWER, gold_text, text_key
from reward_service.math.text import MONEY, Token, Unreadable, normalise, tokenise
from reward_service.math.value import read_list

SEPARATORS = frozenset({",", ";", "or"})  # tokens that separate the items of a list
_PUNCTUATION = set(".,:;!?/-()\"'*`")
_SENTENCE_END = frozenset(".!?")
_TRIG = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_LETTER_UNIT = re.compile(
    r"(?<=[\d})])(\s*)((?:[mshglLNJWVKCFA])(?:\s*\^\s*(?:\{-?[1-4]\}|[1-4]))?"
    r"(?:\s*/\s*(?:[mshlL]|kg)(?:\s*\^\s*(?:\{-?[1-4]\}|[1-4]))?)?)\s*\.?$"
)


@dataclass(frozen=True)
class Reading:
    """What was read from one text.

    `key` is the text itself, normalised for comparison as text. `value` is a value of
    reward_service/math/value.py, or None with the reason in `problem`. `tokens_text` is the text of
    the tokens that were read. `words` are the words beside the value, and `hedges` those of them
    that qualify it ("about"). `percent` says whether a percent sign was read. `unit_letter` is the
    reading of the same text with its last letter taken as a unit ("5 m"), and `spaced_letter` says
    whether white space stands before that letter.
    """

    key: str
    value: object = None
    problem: str = ""
    tokens_text: str = ""
    words: tuple[str, ...] = ()
    hedges: frozenset[str] = frozenset()
    percent: bool = False
    unit_letter: Reading | None = None
    spaced_letter: bool = False


def read(text: str) -> Reading:
    """The one value that `text` states, or the reason why it states none."""
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
        letter = _LETTER_UNIT.search(plain)
        if letter and reading.value is not None:
            as_unit = _read_tokens(key, f"{plain[: letter.start()]} \\text{{{letter.group(2)}}}")
            reading = replace(reading, unit_letter=as_unit, spaced_letter=bool(letter.group(1)))
        return reading
    except Unreadable as error:
        return Reading(key, problem=str(error))
    except RecursionError:
        return Reading(key, problem="too deeply nested to evaluate")


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Reading:
    """The reading of a reference answer as a data set stores it. Results are cached."""
    return read(gold_text(gold))


def is_separator(token: Token) -> bool:
    """Whether the token separates two items of a list: a comma, a semicolon, or the word "or"."""
    return token.kind == "op" and token.text in SEPARATORS


def _read_tokens(key: str, plain: str) -> Reading:
    tokens = tokenise(plain, units.known)
    hedges = frozenset(
        t.text.lower() for t in tokens if t.kind == "word" and t.text.lower() in units.HEDGES
    )
    value_tokens, words = _without_words(tokens)
    tokens_text = f"{' '.join(t.text for t in value_tokens):.150}"
    if words:
        tokens_text += f" (words: {' '.join(words):.80})"
    percent = any(t.text == "%" for t in value_tokens)
    return Reading(key, read_list(value_tokens), "", tokens_text, tuple(words), hedges, percent)


def _without_words(tokens: list[Token]) -> tuple[list[Token], list[str]]:
    """(tokens of the value, words around it).

    Raises Unreadable unless each item of the list states exactly one value.
    """
    tokens = _without_final_punctuation(tokens)
    if not any(token.kind == "word" or token.text in (".", ":") for token in tokens):
        return tokens, []
    _refuse_code(tokens)
    value_tokens: list[Token] = []
    words: list[str] = []
    for part in _parts(tokens):
        runs, part_words = _runs(part)
        if len(runs) > 1:
            runs = [run for run in runs if not _is_symbol(run)]
        if len(runs) > 1:
            raise Unreadable("more than one value is stated")
        if runs and _is_symbol(runs[0]) and part_words and len(tokens) > 1 + len(part_words):
            runs = []
        if not runs and part[0].text == "or":
            raise Unreadable("an alternative that is no value")
        words += part_words
        if runs:
            if value_tokens:
                value_tokens.append(part[0])  # the separator: this is not the first item
            value_tokens += runs[0]
    if not value_tokens:
        raise Unreadable("words only")
    return value_tokens, words


def _without_final_punctuation(tokens: list[Token]) -> list[Token]:
    """The tokens without punctuation at the end; "!" stays a factorial if there is no word."""
    while (
        tokens
        and tokens[-1].kind == "op"
        and tokens[-1].text in (*".,;:!", r"\row")
        and (tokens[-1].text != "!" or any(t.kind == "word" for t in tokens))
    ):
        tokens = tokens[:-1]
    return tokens


def _refuse_code(tokens: list[Token]) -> None:
    """Raises Unreadable for a function call such as f(x) or an attribute such as a.b."""
    for first, second in zip(tokens, tokens[1:], strict=False):
        call = first.kind == "word" and second.text == "("
        attribute = first.text == "." and second.kind in ("sym", "word")
        if not second.spaced and (call or attribute):
            raise Unreadable("looks like code")


def _is_symbol(run: list[Token]) -> bool:
    return len(run) == 1 and run[0].kind == "sym"


def _parts(tokens: list[Token]) -> list[list[Token]]:
    """The items of the list outside of all brackets, each beginning with its separator."""
    parts, depth = [[]], 0
    for token in tokens:
        if token.kind == "op":
            if token.text in ("(", "[", "{", r"\{", r"\mat", r"\langle"):
                depth += 1
            if token.text in (")", "]", "}", r"\}", r"\endmat", r"\rangle"):
                depth -= 1
            if depth == 0 and is_separator(token):
                parts.append([])
        parts[-1].append(token)
    return [part for part in parts if part]


def _runs(part: list[Token]) -> tuple[list[list[Token]], list[str]]:
    """(runs of tokens between the words and sentence ends of a list item, its words).

    A run is trimmed of signs at its ends that belong to the sentence. Runs of punctuation alone are
    left out; other signs that belong to no value raise Unreadable.
    """
    runs: list[list[Token]] = [[]]
    words: list[str] = []
    for index, token in enumerate(part):
        sentence_end = (
            token.kind == "op"
            and token.text in _SENTENCE_END
            and (token.text != "!" or index + 1 == len(part))
        )
        if token.kind == "word":
            words.append(token.text)
        if token.kind == "word" or sentence_end or (index == 0 and is_separator(token)):
            if token.text not in MONEY or (runs[-1] and runs[-1][-1].text != "-"):
                runs.append([])
        else:
            runs[-1].append(token)
    trimmed = []
    for run in map(_trim, runs):
        if any(token.kind in ("num", "sym", "fun") or token.text.startswith("\\") for token in run):
            trimmed.append(run)
        elif not {token.text for token in run} <= _PUNCTUATION:
            raise Unreadable("signs that belong to no value")
    return trimmed, words


def _trim(run: list[Token]) -> list[Token]:
    """The run without the signs at its ends that belong to the sentence around it."""
    while run and run[0].kind == "op" and run[0].text in (":", "=", ")", "]", ".", ","):
        run = run[1:]
    final = (":", "=", "(", "[", "/", "-", "*", ".", ",")
    while run and run[-1].kind == "op" and run[-1].text in final:
        run = run[:-1]
    return run
