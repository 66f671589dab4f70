"""Rules that shape a response: its language, length, repetition and number of reasoning steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from reward_service.rules.format import reasoning_of

_WORD = re.compile(
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\u4e00-\u9fff\u3400-\u4dbf]|[\u3040-\u30ff]+|[^\W\d_]+"
)
_SCRIPTS = {
    "ko": re.compile(r"[\uac00-\ud7a3\u3131-\u318e]"),
    "zh": re.compile(r"[\u4e00-\u9fff\u3400-\u4dbf]"),
    "ja": re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]"),
    "en": re.compile(r"[A-Za-z]"),
}
_STEP = re.compile(
    r"(?im)^\s*(?:step\s*\d+|\d+[.)]\s|[-*]\s|第[一二三四五六七八九十\d]+步)"
    r"|\b(?:first|second|third|next|then|finally)\b,"
    r"|(?:首先|其次|然后|最后|먼저|다음으로|마지막으로)"
)


def language_reward(text: str, target: str) -> float:
    """Share of the words of the reasoning that are written in the script of `target`, in [0, 1].

    `target` is en, ko, zh or ja. The rule tells scripts apart, not languages: any text in Latin
    script counts as en. A Han character counts as one word. LaTeX commands, tags and single Latin
    letters (variables) are not counted. Reasoning that contains no word scores 1.0, or 0.0 if it is
    blank. Raises ValueError for an unknown target.
    Source: DeepSeek-R1 (arXiv:2501.12948), section 2.3.2.
    """
    if target not in _SCRIPTS:
        raise ValueError(
            f"reward.options.language.target={target!r}: expected one of {', '.join(_SCRIPTS)}"
        )
    reasoning = re.sub(r"</?(?:think|answer)>|\\[A-Za-z]+", " ", reasoning_of(text))
    words = [word for word in _WORD.findall(reasoning) if len(word) > 1 or not word.isascii()]
    if not words:
        return float(bool(reasoning.strip()))
    return sum(bool(_SCRIPTS[target].match(word)) for word in words) / len(words)


def cosine_length_reward(
    tokens: int,
    max_tokens: int,
    right: bool,
    correct: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-1.0, -0.5),
    exceeded: float = -1.0,
) -> float:
    """Cosine schedule over the length of the completion, in tokens.

    With (start, end) = `correct` for a right answer and `wrong` for a wrong one, the value is end +
    (start - end) (1 + cos(pi tokens / max_tokens)) / 2, and `exceeded` at or beyond max_tokens. The
    defaults prefer short right answers and long wrong ones. Source: the cosine reward of
    arXiv:2502.03373.
    """
    if tokens >= max_tokens:
        return exceeded
    start, end = correct if right else wrong
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * max(tokens, 0) / max_tokens))


def soft_overlong_reward(tokens: int, max_tokens: int, cache: int) -> float:
    """Penalty for completions close to the length limit; all three arguments are in tokens.

    The value is 0 up to max_tokens - cache, falls linearly to -1 at max_tokens, and stays -1
    beyond. Raises ValueError unless 0 < cache <= max_tokens. Source: DAPO (arXiv:2503.14476),
    equation 13.
    """
    if not 0 < cache <= max_tokens:
        raise ValueError(
            f"reward.options.soft_overlong.cache={cache}: expected 1 to max_tokens={max_tokens}"
        )
    return min(0.0, max(-1.0, (max_tokens - cache - tokens) / cache))


def repetition_reward(text: str, n: int = 4) -> float:
    """-(1 - distinct / all) over the word n-grams of the whole response, in (-1, 0].

    A response of fewer than n words scores 0. Source: the n-gram repetition penalty of
    arXiv:2502.03373, computed here as a share instead of a cost per token.
    """
    words = re.findall(r"[\u4e00-\u9fff]|[^\W_]+|[^\w\s]", text.casefold())
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def reasoning_steps_reward(text: str, target: int = 3) -> float:
    """Number of marked steps in the reasoning divided by `target`, at most 1.

    Numbered lines, bullets and words such as "First," mark a step.
    """
    return min(1.0, sum(1 for _ in _STEP.finditer(reasoning_of(text))) / target)
