"""Step rewards by rule: where the steps of a response end and how good each is. Pure.

What process supervision (DeepSeekMath 4.1.3) reads, in the shape in which a process reward model gives it too. A rule
maps a response to (end, reward) pairs: `end` is the offset in characters just past the step.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from reward_service.rules import reasoning_of

_SUM = re.compile(r"(?<!\d)(\d+)\+(\d+)=(?=(\d+))")


def running_sum(response: str) -> list[tuple[int, float]]:
    """Every a+b=c of the reasoning, 1.0 where it is right, else 0.0: "12+30=42+4=47" has the steps 42 and 47."""
    start = response.find(reasoning_of(response))
    return [(start + m.end(3), float(int(m[1]) + int(m[2]) == int(m[3])))
            for m in _SUM.finditer(reasoning_of(response)[:10_000])]


STEP_RULES: dict[str, Callable[[str], list[tuple[int, float]]]] = {"running_sum": running_sum}


def token_at(ids: Sequence[int], end: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Index of the token that holds character `end` - 1 of the decoded text. By bisection: log2(T) decodings."""
    return bisect_left(range(1, len(ids)), end, key=lambda n: len(decode(ids[:n])))


def token_steps(steps: Sequence[tuple[int, float]], prefill: int, ids: Sequence[int], total: float,
                decode: Callable[[Sequence[int]], str]) -> tuple[list[float], list[int]]:
    """(rewards, token indices) of `steps`, and as the last step the whole answer's reward at its last token.

    `prefill`: characters of the response that stand in the prompt; steps that end there have no token."""
    inside = [(reward, token_at(ids, end - prefill, decode)) for end, reward in steps if end > prefill]
    return [r for r, _ in inside] + [total], [i for _, i in inside] + [len(ids) - 1]
