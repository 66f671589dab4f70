"""Does the final answer equal the gold? The policy of docs/rewards.md, pure; nothing a model writes is ever executed.

An answer is read whole, by a grammar of our own (mathtext, mathvalue, mathexpr), or it is not a value: a part of it can
never match alone. Comparison is exact. math-verify reads what the grammar does not know and a gold may hold (integrals,
sums, limits). All work is bounded before it starts; the worker's hard deadline stands behind that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from reward_service.math import units
from reward_service.math.expression import constant_ratio, equal, evaluate
from reward_service.math.text import MONEY, Token, Unreadable, closing_brace, normalise, tokenise
from reward_service.math.value import (
    Assign,
    Based,
    Intervals,
    Relation,
    Seq,
    as_intervals,
    read_list,
    symbols_of,
)
from reward_service.rules.rules import Grade

MAX_ANSWER = 20_000  # characters; a longer answer is compared as text only
MAX_MEMBERS = 200
_PUNCTUATION = set(".,:;!?/-()\"'*`")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{\\]))")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathsf|boldsymbol)\s*\{([^{}]*)\}"
)
_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:correct\s+|final\s+)?(?:answer|option|choice)"
    r"(?:\s+is|\s*[:=])+\s*:?\s*",
    re.IGNORECASE,
)
_TRIG = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_LETTER_AND_TEXT = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([a-z])\)|([a-z])\s*[).:]|([a-z])\s+[-–=]+)\s*(.*)",
    re.DOTALL | re.IGNORECASE,
)
_MORE_LETTERS = re.compile(r"(?:\bor\b|\band\b|,|/|;|&|\|)\s*\(?[A-J]\b|\([A-J]\)|\b[A-J]\)")
_LETTER_IN_WORDS = re.compile(
    r"(?:(?i:\b(?:is|option|choice|answer)\b)|[:：=]|答案|选|選|정답은|답은)[\s是为:：]*\(?([A-J])\)?(?![A-Za-z])"
)
_LETTER_UNIT = re.compile(
    r"(?<=[\d})])(\s*)((?:[mshglLNJWVKCFA])(?:\s*\^\s*(?:\{-?[1-4]\}|[1-4]))?"
    r"(?:\s*/\s*(?:[mshlL]|kg)(?:\s*\^\s*(?:\{-?[1-4]\}|[1-4]))?)?)\s*\.?$"
)
_BEYOND = re.compile(r"\\(?:int|sum|prod|lim|iint|oint|partial|nabla)(?![A-Za-z])")


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


# ---- extraction
def last_box(text: str) -> str | None:
    """Content of the last \\boxed{} or \\fbox{}, or None. Raises Unreadable if it is not closed."""
    matches = list(_BOX.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    if not match.group(1):
        return text[match.end()]
    end = closing_brace(text, match.end())
    if end < 0:
        raise Unreadable("the last box is never closed")
    return text[match.end() : end]


def gold_text(gold: str) -> str:
    """The answer of a gold as a dataset stores it: after GSM8K's ####, in MATH's last box, or all of it."""
    if "####" in gold:
        gold = gold.rpartition("####")[2]
    box = last_box(gold)
    return (gold if box is None else box).strip()


def text_key(text: str) -> str:
    """Words for comparison as text: no LaTeX wrappers, one kind of space, no final period; case only where digits are.

    Upper and lower case differ beside digits, where they may be units or numerals.
    """
    if len(text) > MAX_ANSWER:
        return text
    text = _WRAPPER.sub(r" \1 ", text)
    text = re.sub(r"\\[,;:! ]|\\[()\[\]]|[$\s]+", " ", text).strip(" \"'“”`*").rstrip(".。")
    text = " ".join(_LEAD.sub("", text).split())
    return text if any(char.isdigit() for char in text) else text.casefold()


def strip_lead(text: str) -> str:
    """Without white space, math delimiters and a lead such as "The answer is"."""
    return _LEAD.sub("", text.strip().strip("$").strip()).strip()


# ---- reading
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


# ---- comparison
def compare(gold: Reading, answer: Reading) -> tuple[bool, str]:
    """(equal, why) for two readings that both have a value."""
    if gold.hedges != answer.hedges:
        return False, f"the answer is qualified: {', '.join(sorted(gold.hedges ^ answer.hedges))}"
    pairs = [(gold, answer)]
    if answer.unit_letter and not symbols_of(gold.value):
        pairs.append((gold, answer.unit_letter))
    if gold.unit_letter and gold.spaced_letter and not symbols_of(answer.value):
        pairs.append((gold.unit_letter, answer))
    if gold.unit_letter and answer.unit_letter:
        pairs.append((gold.unit_letter, answer.unit_letter))
    elif gold.unit_letter and answer.words:
        pairs.append((gold.unit_letter, answer))
    elif answer.unit_letter and gold.words:
        pairs.append((gold, answer.unit_letter))
    for pair in pairs:
        same, why = _compare_values(*pair)
        if same:
            break
    return same, why


def _compare_values(gold: Reading, answer: Reading) -> tuple[bool, str]:
    same = same_value(gold.value, answer.value)
    if (
        not same
        and gold.percent
        and not answer.percent
        and not any(units.unit_of(list(answer.words)))
    ):
        same = same_value(_without_percent(gold.value), answer.value)
    if not same:
        return False, "the values differ"
    if not units.same_unit(list(gold.words), list(answer.words)):
        return False, f"the units differ: {' '.join(gold.words)} / {' '.join(answer.words)}"[:200]
    return True, "equal"


def _without_percent(value):
    if isinstance(value, Seq):
        return Seq(
            value.kind, tuple(_without_percent(item) for item in value.items), value.brackets
        )
    if isinstance(value, Assign):
        return Assign(value.name, _without_percent(value.value), value.function)
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return (
            _without_percent(value[1])
            if value[0] == "%"
            else (
                value[0],
                *(
                    _without_percent(child) if isinstance(child, tuple) else child
                    for child in value[1:]
                ),
            )
        )
    return value


def same_value(gold, answer) -> bool:
    """Equality of two values of mathvalue."""
    if isinstance(gold, Assign) or isinstance(answer, Assign):
        return _same_assigned(gold, answer)
    gold, answer = _single(gold), _single(answer)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return _same_numeral(gold, answer)
    if isinstance(gold, Intervals) or isinstance(answer, Intervals):
        first, second = as_intervals(gold), as_intervals(answer)
        return first is not None and second is not None and _same_intervals(first, second)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relation(gold, answer)
    if isinstance(gold, Seq) and isinstance(answer, Seq):
        return _same_sequence(gold, answer)
    if isinstance(answer, Seq) and answer.kind == "list" and isinstance(gold, tuple):
        return 0 < len(answer.items) <= MAX_MEMBERS and all(
            same_value(gold, item) for item in answer.items
        )
    if any(isinstance(side, Seq | Relation) for side in (gold, answer)):
        return _same_named(gold, answer)
    return equal(gold, answer)


def _single(value):
    return (
        value.items[0]
        if isinstance(value, Seq) and value.kind == "list" and len(value.items) == 1
        else value
    )


def _same_assigned(gold, answer) -> bool:
    if isinstance(gold, Assign) and isinstance(answer, Assign):
        alike = gold.name == answer.name or gold.function or answer.function
        return alike and same_value(gold.value, answer.value) or _same_relation_of(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation_of(gold, answer)
    if isinstance(gold, Intervals) or isinstance(answer, Intervals) or not _named(gold, answer):
        named, other = (gold, answer) if isinstance(gold, Assign) else (answer, gold)
        return named.name not in symbols_of(other) and (
            same_value(named.value, answer) if named is gold else same_value(gold, named.value)
        )
    return False


def _named(*values) -> bool:
    return any(
        isinstance(value, Seq) and any(isinstance(item, Assign) for item in value.items)
        for value in values
    )


def _same_relation_of(gold, answer) -> bool:
    sides = [
        Relation("=", ("s", side.name), side.value)
        if isinstance(side, Assign) and isinstance(side.value, tuple) and not side.function
        else side
        for side in (gold, answer)
    ]
    return all(isinstance(side, Relation) for side in sides) and _same_relation(*sides)


def _same_numeral(gold, answer) -> bool:
    if isinstance(gold, Based) and isinstance(answer, Based):
        return gold == answer
    based, other = (gold, answer) if isinstance(gold, Based) else (answer, gold)
    return (
        isinstance(other, tuple)
        and other[0] == "n"
        and other[1].denominator == 1
        and (len(based.digits) < 4000 and str(other[1].numerator) == based.digits)
    )


def _same_intervals(gold: Intervals, answer: Intervals) -> bool:
    if (
        gold.name
        and answer.name
        and gold.name != answer.name
        or len(gold.parts) != len(answer.parts)
    ):
        return False
    left = list(answer.parts)
    for low, low_open, high, high_open in gold.parts:
        found = next(
            (
                p
                for p in left
                if (p[1], p[3]) == (low_open, high_open) and equal(low, p[0]) and equal(high, p[2])
            ),
            None,
        )
        if found is None:
            return False
        left.remove(found)
    return True


def _same_relation(gold: Relation, answer: Relation) -> bool:
    """Same operator, and sides that differ by a nonzero (for inequalities: positive) constant factor."""
    if gold.op != answer.op or symbols_of(gold) != symbols_of(answer):
        return False
    first = ("+", gold.left, ("-", gold.right))
    second = ("+", answer.left, ("-", answer.right))
    if equal(first, second) or (gold.op in ("=", r"\ne") and equal(first, ("-", second))):
        return True
    ratio = constant_ratio(first, second)
    return ratio is not None and (ratio > 0 or gold.op in ("=", r"\ne"))


def _same_sequence(gold: Seq, answer: Seq) -> bool:
    if _named(gold, answer) and not (_named(gold) and _named(answer)):
        return _same_named(gold, answer)
    if gold.kind != answer.kind or max(len(gold.items), len(answer.items)) > MAX_MEMBERS:
        return False
    if gold.kind != "list":
        first, second = as_intervals(gold), as_intervals(answer)
        if first and second and _rising(gold) and not _same_intervals(first, second):
            return False
        return len(gold.items) == len(answer.items) and all(
            map(same_value, gold.items, answer.items)
        )
    left, seen = list(answer.items), []
    for item in gold.items:
        if any(same_value(item, other) for other in seen):
            continue
        seen.append(item)
        matching = [other for other in left if same_value(item, other)]
        if not matching:
            return False
        left = [other for other in left if not any(other is match for match in matching)]
    return not left


def _rising(pair: Seq) -> bool:
    low, high = pair.items
    if ("c", "inf") in (high, low) or ("-", ("c", "inf")) in (low, high):
        return True
    try:
        return bool(evaluate(("+", high, ("-", low))).real > 0)
    except Unreadable:
        return False


def _same_named(gold, answer) -> bool:
    """x = 2, y = 3 against (2, 3) or 2, 3: the values in the order of their names; x = 2 or x = 3 in any order."""
    named, other = (gold, answer) if _named(gold) else (answer, gold)
    if not (
        isinstance(named, Seq)
        and isinstance(other, Seq)
        and all(isinstance(i, Assign) for i in named.items)
    ):
        return False
    if len({item.name.partition("_")[0] for item in named.items}) == 1:
        return other.kind == "list" and _same_sequence(
            Seq("list", tuple(i.value for i in named.items)), other
        )
    values = [item.value for item in sorted(named.items, key=lambda item: item.name)]
    return len(values) == len(other.items) and all(map(same_value, values, other.items))


# ---- choices and words
def choice_letter(text: str, gold: bool = False) -> str:
    """The option letter that `text` names, upper case, or "". A gold must be a capital, bare or in parentheses."""
    text = " ".join(
        _LEAD.sub("", re.sub(r"\\[,;:! ]|[$*`~]", " ", _WRAPPER.sub(r"\1 ", text)).strip()).split()
    )
    match = _LETTER.fullmatch(text)
    if match:
        return match.group(1).upper() if not gold or match.group(1).isupper() or "(" in text else ""
    match = _LETTER_AND_TEXT.fullmatch(text)
    if match and (not gold or (match.group(1) or match.group(2) or "a").isupper()):
        return (
            ""
            if _MORE_LETTERS.search(match.group(4))
            else next(filter(None, match.groups()[:3])).upper()
        )
    if gold:
        return ""
    letters = {found.group(1) for found in _LETTER_IN_WORDS.finditer(text)}
    return letters.pop() if len(letters) == 1 and not _MORE_LETTERS.search(text) else ""


def grade_math(answer: str, gold: str) -> Grade:
    """Verdict on an answer (the content of the answer block) against a gold as the dataset stores it."""
    wanted = gold_text(gold)
    if not wanted:
        return Grade(0.0, status="ungradable", reason="the gold answer is empty")
    box = last_box(answer)
    found = (answer if box is None else box).strip()
    shown = found[:500]
    if not found:
        return Grade(0.0, shown, "the answer is blank")
    target = read_gold(gold)
    letter = choice_letter(wanted, gold=True)
    if letter and len(found) <= 2000:
        chosen = choice_letter(found)
        if chosen:
            return Grade(float(chosen == letter), shown, f"read as choice {chosen}, gold {letter}")
    if text_key(found) and text_key(found) == target.key:
        return Grade(1.0, shown, "the same text as the gold")
    if _BEYOND.search(wanted):
        return _grade_by_library(found, wanted)
    if target.value is None:
        return _grade_words(found, target, wanted)
    reading = read(found)
    if reading.value is None:
        return Grade(0.0, shown, f"not read as one value: {reading.problem}")
    if letter and reading.words:
        return Grade(0.0, shown, "words that name no choice")
    same, why = compare(target, reading)
    return Grade(float(same), shown, f"{why}; read as {reading.shown}")


def _grade_words(found: str, target: Reading, wanted: str) -> Grade:
    """A gold that is no value: the same words match. One that looks like mathematics cannot be judged otherwise."""
    split = re.compile(r"\s*(?:,|;|\band\b)\s*")
    gold_items = sorted(filter(None, split.split(target.key)))
    if len(gold_items) > 1 and gold_items == sorted(filter(None, split.split(text_key(found)))):
        return Grade(1.0, found[:500], "the same words as the gold, as a list")
    if re.search(r"[\\^_{}=<>]|\d", re.sub(_WRAPPER, r"\1", wanted)):
        return Grade(0.0, found[:500], f"the gold cannot be read: {target.problem}", "ungradable")
    return Grade(0.0, found[:500], "not the same words as the gold")


def _grade_by_library(found: str, wanted: str) -> Grade:
    """Integrals, sums and limits in a gold: math-verify's parser on both, sympy's difference; both sides short."""
    if len(found) > 500 or len(wanted) > 500:
        return Grade(0.0, found[:500], "too long to evaluate")
    import logging

    import sympy
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its alarm is off: ours is the worker's
    config = [LatexExtractionConfig()]
    sides = [
        parse(f"${text.strip('$ ')}$", config, fallback_mode="no_fallback", parsing_timeout=0)
        for text in (wanted, found)
    ]
    if not sides[0] or not isinstance(sides[0][0], sympy.Expr):
        return Grade(0.0, found[:500], "the gold cannot be read", "ungradable")
    if not sides[1] or not isinstance(sides[1][0], sympy.Expr):
        return Grade(0.0, found[:500], "not read as one value by math-verify")
    same = sympy.simplify(sides[0][0].doit() - sides[1][0].doit()) == 0
    return Grade(float(same), found[:500], f"read by math-verify as {str(sides[1][0])[:150]}")
