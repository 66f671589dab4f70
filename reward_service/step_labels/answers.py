"""Sampled answers, their steps and prefixes, and the annotations table made of their labels. Pure.

    ROLLOUT tables -> answers with step ends -> distinct prefixes -> labels -> table of ANNOTATION

These functions run in Ray tasks (reward_service/step_labels/tasks.py), because they read token ids.
Labels come from reward_service/step_labels/annotation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from actors.data.prompt import Prompt
from actors.records import PROMPT
from reward_service.step_labels.annotation import Label, Prefix, prefixes, step_labels
from reward_service.step_labels.steps import step_ends, sum_steps, token_at

ANNOTATION = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("question", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("completion", pa.string()),
        ("ends", pa.list_(pa.int32())),  # index of the last token of each step
        ("soft", pa.list_(pa.float64())),
        ("hard", pa.list_(pa.float64())),
        # Whether each step is right by the task's own check; null where the task has none.
        ("exact", pa.list_(pa.float64())),
        ("accuracy", pa.float64()),
    ]
)
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Answer:
    """One sampled answer. `ends` int [steps]: index into `ids` of the last token of each step."""

    prompt: Prompt
    prompt_ids: list[int]
    ids: list[int]
    text: str
    ends: list[int]
    accuracy: float  # nan: not judged


@dataclass(frozen=True)
class PrefixScalars:
    """What the driver needs to know of one prefix: whose it is, its length, and what it says.

    `prefill` is the response up to the prefix's end, which is graded with the completion.
    """

    prompt_id: str
    tokens: int
    prefill: str


def decoder(tokenizer: Any) -> Decode:
    """The function from token ids to text, without special tokens."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode


def read_answers(
    prompts: Sequence[Prompt],
    accuracy: Sequence[float],
    steps: str,
    decode: Decode,
    tables: Sequence[pa.RecordBatch],
) -> list[Answer]:
    """The samples of some groups, in order, cut into steps.

    One prompt and one ROLLOUT table a group; `accuracy` has one value a sample, over all groups.
    `steps` is the splitter's name (data.steps).
    """
    answers: list[Answer] = []
    for prompt, table in zip(prompts, tables, strict=True):
        columns = (table.column(c).to_pylist() for c in ("prompt_ids", "completion_ids"))
        for prompt_ids, ids in zip(*columns, strict=True):
            text = decode(ids)
            ends = step_ends(steps, prompt.prefill, text, ids, decode)
            answers.append(
                Answer(prompt, prompt_ids, ids, text, ends, float(accuracy[len(answers)]))
            )
    return answers


def distinct_prefixes(answers: Sequence[Answer]) -> list[tuple[Answer, Prefix]]:
    """Every distinct prefix of the answers to each prompt, with the first answer to that prompt.

    The prefixes of one prompt follow one another, so that they share blocks of the prefix cache.
    """
    by_prompt: dict[str, list[Answer]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt.prompt_id, []).append(answer)
    return [
        (same[0], prefix)
        for same in by_prompt.values()
        for prefix in prefixes([(answer.ids, answer.ends) for answer in same])
    ]


def prefix_prompts(
    answers: Sequence[Answer], decode: Decode
) -> tuple[list[PrefixScalars], pa.RecordBatch]:
    """The prompts that the completions start from: scalars of each, and PROMPT, one row each."""
    asked = distinct_prefixes(answers)
    scalars = [
        PrefixScalars(answer.prompt.prompt_id, len(prefix), answer.prompt.prefill + decode(prefix))
        for answer, prefix in asked
    ]
    columns = {
        "prompt_id": [s.prompt_id for s in scalars],
        "prompt_ids": [[*answer.prompt_ids, *prefix] for answer, prefix in asked],
    }
    return scalars, pa.RecordBatch.from_pydict(columns, schema=PROMPT)


def annotations(
    answers: Sequence[Answer], labels: Sequence[Label | None], decode: Decode
) -> tuple[dict[str, int], pa.Table]:
    """Counts (answers, dropped, steps) and the table of ANNOTATION, one row a labelled answer.

    `labels` are those of `distinct_prefixes(answers)`, in its order. An answer of which a step has
    no label is dropped.
    """
    known: dict[str, dict[Prefix, Label | None]] = {a.prompt.prompt_id: {} for a in answers}
    for (answer, prefix), label in zip(distinct_prefixes(answers), labels, strict=True):
        known[answer.prompt.prompt_id][prefix] = label
    rows = []
    for answer in answers:
        of_steps = step_labels(
            answer.ids, answer.ends, answer.accuracy, known[answer.prompt.prompt_id]
        )
        if of_steps is not None:
            rows.append(_row(answer, of_steps, decode))
    counts = {
        "answers": len(rows),
        "dropped": len(answers) - len(rows),
        "steps": sum(len(row["ends"]) for row in rows),
    }
    return counts, pa.Table.from_pylist(rows, schema=ANNOTATION)


def _row(answer: Answer, labels: Sequence[Label], decode: Decode) -> dict[str, Any]:
    return {
        "prompt_id": answer.prompt.prompt_id,
        "question": answer.prompt.question,
        "prompt_ids": answer.prompt_ids,
        "completion_ids": answer.ids,
        "completion": answer.text,
        "ends": answer.ends,
        "soft": [soft for soft, _ in labels],
        "hard": [hard for _, hard in labels],
        "exact": exact_labels(answer, decode),
        "accuracy": answer.accuracy,
    }


def exact_labels(answer: Answer, decode: Decode) -> list[float | None] | None:
    """Whether each step is right by the task's own check: 1.0, 0.0, or None where it does not say.

    The last is the answer's accuracy. None where the task has no such check (only sums have one).
    """
    if not answer.prompt.data_source.startswith("arithmetic"):
        return None
    prefill = answer.prompt.prefill
    known = {
        token_at(answer.ids, end - len(prefill), decode): float(right)
        for end, right in sum_steps(answer.prompt.question, prefill + answer.text)
        if end > len(prefill)
    }
    return [known.get(end) for end in answer.ends[:-1]] + [answer.accuracy]
