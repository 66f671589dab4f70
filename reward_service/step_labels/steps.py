"""The steps of a response: where each step ends (splitters) and whether it is right (step rules).

Process supervision (DeepSeekMath, arXiv:2402.03300, section 4.1.3) and process reward models use
them. The end of a step is the offset in characters just after it. A step rule maps a response to
(end, reward) pairs, and a splitter maps it to ends alone. The setting `data.steps` names either.
All functions are pure.
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
    """(end, reward) of every a+b=c in the reasoning: 1.0 if the sum is right, else 0.0.

    Example: "12+30=42+4=47" has the steps 12+30=42 (right) and 42+4=47 (wrong).
    """
    start = response.find(reasoning_of(response))
    return [
        (start + m.end(3), float(int(m[1]) + int(m[2]) == int(m[3])))
        for m in _SUM.finditer(reasoning_of(response)[:10_000])
    ]


def sum_steps(question: str, response: str) -> list[tuple[int, bool]]:
    """(end, whether the step is right) of every a+b=c in the reasoning about a sum.

    The right steps of "12+34+5=?" are those of its exact running sum, in any place: 12+30=42,
    42+4=46 and 46+5=51. A step that starts from a wrong total is wrong even if its own sum is
    correct. Raises ValueError for a question that is not a sum.
    """
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


# Every step rule is also a splitter. So is "separator:TEXT": a step ends after each TEXT.
SPLITTERS: dict[str, Callable[[str], list[int]]] = {
    "newline": lambda response: [m.end() for m in re.finditer(r"[^\n]\n+", response)],
    "running_sum": lambda response: [end for end, _ in running_sum(response)],
}
_SEPARATOR = "separator:"


def splitter(name: str) -> Callable[[str], list[int]]:
    """The splitter that `data.steps` names: it maps a response to the ends of its steps, in order.

    The last end may lie before the end of the response. Raises ValueError for an unknown name.
    """
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
    """Indices into `ids` of the last token of each step, in order and without repetition.

    The response is prefill + completion. `ids` int [T], T >= 1, are the tokens of the completion,
    and `decode` returns the text of the first n of them. The last index is always T - 1: the text
    after the last end is a step as well. Steps that end within the prefill have no token.
    """
    ends = [end - len(prefill) for end in splitter(name)(prefill + completion)]
    tokens = {token_at(ids, end, decode) for end in ends if end > 0}
    return sorted(tokens | {len(ids) - 1})


def token_at(ids: Sequence[int], end: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Index of the token that contains character `end` - 1 of the decoded text.

    Found by bisection, with about log2(T) calls of `decode`.
    """
    return bisect_left(range(1, len(ids)), end, key=lambda n: len(decode(ids[:n])))


def token_steps(
    steps: Sequence[tuple[int, float]],
    prefill: int,
    ids: Sequence[int],
    total: float,
    decode: Callable[[Sequence[int]], str],
) -> tuple[list[float], list[int]]:
    """(rewards, token indices) of the steps of an answer.

    The last step carries `total`, the reward of the whole answer, at the answer's last token.
    `prefill` is the number of characters of the response that are part of the prompt; steps that
    end there have no token and are left out.
    """
    inside = [
        (reward, token_at(ids, end - prefill, decode)) for end, reward in steps if end > prefill
    ]
    return [r for r, _ in inside] + [total], [i for _, i in inside] + [len(ids) - 1]
