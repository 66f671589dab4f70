"""Rules about the <think> and <answer> tags of a response, and the text between these tags."""

from __future__ import annotations

import re
from collections import Counter

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAG = re.compile("|".join(TAGS))


def format_reward(text: str) -> float:
    """The R1 format rule: 1.0 if the response is <think>...</think><answer>...</answer>, else 0.0.

    Each tag must occur exactly once, in this order, with only white space outside of the two
    blocks. Source: DeepSeek-R1 (arXiv:2501.12948), section 2.2.2, which does not define the check
    exactly.
    """
    matches = list(_TAG.finditer(text))
    if tuple(match.group() for match in matches) != TAGS:
        return 0.0
    outside = (
        text[: matches[0].start()],
        text[matches[1].end() : matches[2].start()],
        text[matches[3].end() :],
    )
    return 0.0 if any(part.strip() for part in outside) else 1.0


def tag_count_reward(text: str) -> float:
    """The share of the four tags that occur exactly once in the response."""
    counts = Counter(match.group() for match in _TAG.finditer(text))
    return sum(counts[tag] == 1 for tag in TAGS) / len(TAGS)


def answer_block(text: str) -> str | None:
    """Content of the last closed <answer> block outside of the reasoning, or None if there is none.

    If the first think tag is </think>, the reasoning is taken to begin at the start of the text
    (its <think> was part of the prompt). A block is inside of the reasoning if a <think> before it
    is still open, and that <think> either is the last think tag or is closed after the block. The
    running time is linear in len(text).
    """
    tags = [(match.group(), match.start(), match.end()) for match in _TAG.finditer(text)]
    think = [name for name, _, _ in tags if name in TAGS[:2]]
    depth = 1 if think and think[0] == "</think>" else 0
    closes_left = think.count("</think>")
    last_think, content_start, answer = "", None, None
    for name, start, end in tags:
        if name in ("<think>", "</think>"):
            if name == "<think>":
                depth += 1
            else:
                depth = max(0, depth - 1)
                closes_left -= 1
            last_think, content_start = name, None
        elif name == "<answer>":
            content_start = end
        elif content_start is not None:
            if depth == 0 or (last_think == "</think>" and closes_left == 0):
                answer = text[content_start:start]
            content_start = None
    return answer


def reasoning_of(text: str) -> str:
    """The text between the first <think> and the last </think>.

    Without <think> the reasoning begins at the start of the text, and without a later </think> it
    ends at the end of the text.
    """
    start, end = text.find("<think>"), text.rfind("</think>")
    return text[start + 7 if start >= 0 else 0 : end if end > start else len(text)]
