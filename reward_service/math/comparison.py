"""Whether the value of an answer equals the value of the reference answer."""

from __future__ import annotations

from reward_service.math import units
from reward_service.math.evaluation import constant_ratio, equal, evaluate
from reward_service.math.reading import Reading
from reward_service.math.text import Unreadable
from reward_service.math.value import (
    Assign,
    Based,
    Intervals,
    Relation,
    Seq,
    as_intervals,
    symbols_of,
)

MAX_MEMBERS = 200


def compare(gold: Reading, answer: Reading) -> tuple[bool, str]:
    """(equal, reason) for two readings that both have a value.

    If the last letter of a text can be a unit ("5 m"), the readings with and without that unit are
    compared, as far as the other side allows them.
    """
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
    """(equal, reason) of the values and units of two readings, each taken as it is."""
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
    """The value with every percent sign removed: 35% becomes 35."""
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
    """Whether two values of reward_service/math/value.py are equal."""
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
    """The only item of a list of length one; any other value as it is."""
    return (
        value.items[0]
        if isinstance(value, Seq) and value.kind == "list" and len(value.items) == 1
        else value
    )


def _same_assigned(gold, answer) -> bool:
    """Compares two values of which at least one is an assignment such as x = 5."""
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
    """Whether any of the values is a sequence that contains an assignment."""
    return any(
        isinstance(value, Seq) and any(isinstance(item, Assign) for item in value.items)
        for value in values
    )


def _same_relation_of(gold, answer) -> bool:
    """Compares two values as relations, an assignment x = a being the equation x = a."""
    sides = [
        Relation("=", ("s", side.name), side.value)
        if isinstance(side, Assign) and isinstance(side.value, tuple) and not side.function
        else side
        for side in (gold, answer)
    ]
    return all(isinstance(side, Relation) for side in sides) and _same_relation(*sides)


def _same_numeral(gold, answer) -> bool:
    """Compares numerals of which at least one has a base; the base of the other may be left out."""
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
    """Whether two unions consist of the same intervals, in any order, for the same unknown."""
    if (
        gold.name
        and answer.name
        and gold.name != answer.name
        or len(gold.parts) != len(answer.parts)
    ):
        return False
    left = list(answer.parts)
    for low, low_open, high, high_open in gold.parts:
        match = next(
            (
                p
                for p in left
                if (p[1], p[3]) == (low_open, high_open) and equal(low, p[0]) and equal(high, p[2])
            ),
            None,
        )
        if match is None:
            return False
        left.remove(match)
    return True


def _same_relation(gold: Relation, answer: Relation) -> bool:
    """Whether two relations have the same operator and the same solutions.

    left - right may differ by a constant factor, which must be positive for inequalities and
    nonzero for equations.
    """
    if gold.op != answer.op or symbols_of(gold) != symbols_of(answer):
        return False
    first = ("+", gold.left, ("-", gold.right))
    second = ("+", answer.left, ("-", answer.right))
    if equal(first, second) or (gold.op in ("=", r"\ne") and equal(first, ("-", second))):
        return True
    ratio = constant_ratio(first, second)
    return ratio is not None and (ratio > 0 or gold.op in ("=", r"\ne"))


def _same_sequence(gold: Seq, answer: Seq) -> bool:
    """Compares lists in any order, counting repeated items once; tuples and ratios in order."""
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
    """Whether the second value of a pair is larger, so that the pair could be an interval."""
    low, high = pair.items
    if ("c", "inf") in (high, low) or ("-", ("c", "inf")) in (low, high):
        return True
    try:
        return bool(evaluate(("+", high, ("-", low))).real > 0)
    except Unreadable:
        return False


def _same_named(gold, answer) -> bool:
    """Compares assignments such as x = 2, y = 3 with a sequence such as (2, 3).

    The values of different names are compared in the alphabetical order of the names. Several
    values of one name (x = 2 or x = 3) are compared with a list in any order.
    """
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
