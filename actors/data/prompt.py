"""A prompt, the templates that render it, and hashes and random generators that never change.

Pure: standard library only.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One question, rendered. `prompt_id` is the same wherever the same question appears.

    Example: Prompt("3f2a...", "12+34=?", "46", "User: 12+34=?\\nAssistant: ", "", "arithmetic",
    "math", {}, 2)
    """

    prompt_id: str
    question: str
    gold: str  # the reference answer as the data set stores it
    text: str  # the rendered template: exactly what is tokenised
    prefill: str  # the end of `text` that belongs to the response and is graded with the completion
    data_source: str
    task: str  # the verifier that grades it: math | countdown | reasoning_gym | code | ...
    extra: dict[str, Any] = field(default_factory=dict)  # JSON-able values for the verifier
    level: int = 0  # difficulty within the data set; 0 where unknown


@dataclass(frozen=True)
class Template:
    """How a question becomes the text of a prompt.

    `body` holds {question} once. `prefill` is appended and counts as the start of the response.
    """

    body: str
    prefill: str = ""

    def render(self, question: str) -> str:
        """The text of the prompt. Braces in the question are left alone."""
        return self.body.replace("{question}", question) + self.prefill


# r1_zero: the conversation template of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), in our words.
TEMPLATES: dict[str, Template] = {
    "r1_zero": Template(
        "What follows is a conversation between a User and an Assistant. The User asks a question "
        "and the Assistant works out the solution. The Assistant first reasons about the problem "
        "in its mind and only then gives the User the answer. The reasoning stands between <think> "
        "and </think>, the answer between <answer> and </answer>, like this: <think> the reasoning "
        "</think> <answer> the answer </answer>.\n"
        "User: {question}\nAssistant:"
    ),
    "short": Template("User: {question}\nAssistant: "),
    "none": Template("{question}"),
}


def find_template(name: str) -> Template:
    """The template called `name`. Raises ValueError, listing the known names, if there is none."""
    if name not in TEMPLATES:
        raise ValueError(f"data.template={name}: expected one of {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def make_prompt(
    question: str,
    gold: str,
    template: str,
    *,
    data_source: str,
    task: str,
    extra: dict[str, Any] | None = None,
    level: int = 0,
) -> Prompt:
    """Render a question. The prompt's id is a hash of its data source and question."""
    layout = find_template(template)
    return Prompt(
        prompt_id=stable_hash(data_source, question),
        question=question,
        gold=gold,
        text=layout.render(question),
        prefill=layout.prefill,
        data_source=data_source,
        task=task,
        extra=extra or {},
        level=level,
    )


def stable_hash(*parts: Any) -> str:
    """A hash of JSON-able values: 16 hex digits, the same in every process and Python version."""
    return hashlib.blake2b(
        json.dumps(parts, ensure_ascii=False).encode(), digest_size=8
    ).hexdigest()


def stable_rng(*parts: Any) -> random.Random:
    """A random generator seeded by a `stable_hash` of `parts` and nothing else."""
    return random.Random(int(stable_hash(*parts), 16))
