"""Steps of a response: where each ends (splitters), and how good each is by rule. Pure.

What process supervision (DeepSeekMath 4.1.3) and process reward models read. An end is the offset in characters just
past a step. A rule maps a response to (end, reward) pairs, a splitter to ends alone; `data.steps` names either.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from actors.data.corpus import parts
from reward_service.rules.format import reasoning_of

_SUM = re.compile(r"(?<!\d)(\d+)\+(\d+)=(?=(\d+))")


def running_sum(response: str) -> list[tuple[int, float]]:
    """Every a+b=c of the reasoning, 1.0 where it is right, else 0.0: "12+30=42+4=47" has the steps 42 and 47."""
    start = response.find(reasoning_of(response))
    return [
        (start + m.end(3), float(int(m[1]) + int(m[2]) == int(m[3])))
        for m in _SUM.finditer(reasoning_of(response)[:10_000])
    ]


def sum_steps(question: str, response: str) -> list[tuple[int, bool]]:
    """(end, whether it is right) of every a+b=c of the reasoning about a sum such as "12+34+5=?": right are the steps
    of its exact running sum, 12+30=42, 42+4=46 and 46+5=51, wherever they stand. What goes on from a wrong total is
    wrong although it adds up. Raises ValueError for a question that is no sum."""
    first, *rest = (int(number) for number in question.removesuffix("=?").split("+"))
    added = [part for number in rest for part in parts(number)]
    totals = list(accumulate(added, initial=first))
    right = set(zip(totals, added, totals[1:], strict=False))
    start = response.find(reasoning_of(response))
    return [
        (start + m.end(3), (int(m[1]), int(m[2]), int(m[3])) in right)
        for m in _SUM.finditer(reasoning_of(response)[:10_000])
    ]


STEP_RULES: dict[str, Callable[[str], list[tuple[int, float]]]] = {"running_sum": running_sum}


# A rule says where steps end too. "separator:TEXT" is a splitter as well: a step ends with each TEXT.
SPLITTERS: dict[str, Callable[[str], list[int]]] = {
    "newline": lambda response: [m.end() for m in re.finditer(r"[^\n]\n+", response)],
    "running_sum": lambda response: [end for end, _ in running_sum(response)],
}
_SEPARATOR = "separator:"


def splitter(name: str) -> Callable[[str], list[int]]:
    """The function of `data.steps`: response -> ends of its steps in order, of which the last may lie before the end
    of the response. Raises ValueError for an unknown name."""
    if name.startswith(_SEPARATOR) and name != _SEPARATOR:
        text = name.removeprefix(_SEPARATOR)
        return lambda response: [m.end() for m in re.finditer(re.escape(text), response)]
    if name not in SPLITTERS:
        raise ValueError(f"{name!r}: expected one of {', '.join(SPLITTERS)}, separator:TEXT")
    return SPLITTERS[name]


def step_ends(
    name: str,
    prefill: str,
    completion: str,
    ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
) -> list[int]:
    """Indices into `ids` of the last token of each step of prefill + completion, in order and each once; the last is
    the completion's last token: what comes after the last end is a step too, that of the answer.

    `ids` int [T], T >= 1; `decode` gives the text of the first n of them. Steps within the prefill have no token."""
    ends = [end - len(prefill) for end in splitter(name)(prefill + completion)]
    found = {token_at(ids, end, decode) for end in ends if end > 0}
    return sorted(found | {len(ids) - 1})


def token_at(ids: Sequence[int], end: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Index of the token that holds character `end` - 1 of the decoded text. By bisection: log2(T) decodings."""
    return bisect_left(range(1, len(ids)), end, key=lambda n: len(decode(ids[:n])))


def token_steps(
    steps: Sequence[tuple[int, float]],
    prefill: int,
    ids: Sequence[int],
    total: float,
    decode: Callable[[Sequence[int]], str],
) -> tuple[list[float], list[int]]:
    """(rewards, token indices) of `steps`, and as the last step the whole answer's reward at its last token.

    `prefill`: characters of the response that stand in the prompt; steps that end there have no token."""
    inside = [
        (reward, token_at(ids, end - prefill, decode)) for end, reward in steps if end > prefill
    ]
    return [r for r, _ in inside] + [total], [i for _, i in inside] + [len(ids) - 1]
