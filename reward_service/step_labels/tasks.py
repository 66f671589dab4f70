"""Step annotation in Ray tasks over tables in the object store.

The driver holds references, scalars and labels. The task bodies are
reward_service/step_labels/answers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayTaskError

from actors.data.prompt import Prompt
from actors.records import PromptRow
from cluster.environment import process_env
from cluster.supervision.remote import get
from reward_service.step_labels.annotation import Label
from reward_service.step_labels.answers import (
    Answer,
    PrefixScalars,
    annotations,
    decoder,
    prefix_prompts,
    read_answers,
)

HINT = "the log of the task in the session's logs folder of Ray"


def _cut(
    prompts: Sequence[Prompt],
    accuracy: Sequence[float],
    steps: str,
    tokenizer: Any,
    *tables: pa.RecordBatch,
) -> tuple[list[PrefixScalars], pa.RecordBatch, list[Answer]]:
    """Task: (scalars of each prefix, PROMPT, answers)."""
    decode = decoder(tokenizer)
    answers = read_answers(prompts, accuracy, steps, decode, tables)
    return *prefix_prompts(answers, decode), answers


def _annotate(
    answers: Sequence[Answer], labels: Sequence[Label | None], tokenizer: Any
) -> tuple[dict[str, int], pa.Table]:
    """Task: (counts, table of ANNOTATION)."""
    return annotations(answers, labels, decoder(tokenizer))


class AnnotationTasks:
    """The tasks of one part. `steps`: data.steps; `timeout_s`: the deadline of each task."""

    def __init__(self, tokenizer: Any, steps: str, timeout_s: float) -> None:
        self.tokenizer = ray.put(tokenizer)
        self.steps, self.timeout_s = steps, timeout_s

    def cut(
        self, prompts: Sequence[Prompt], accuracy: Sequence[float], tables: Sequence[Any]
    ) -> tuple[list[tuple[PrefixScalars, PromptRow]], Any]:
        """Cut the answers in ROLLOUT `tables` (references, one a prompt) into steps.

        Returns the distinct prefixes, each with its token ids by reference, and a reference of the
        answers. `accuracy` has one value a sample.
        """
        scalars_ref, prompts_ref, answers_ref = _task(_cut, 3).remote(
            list(prompts), list(accuracy), self.steps, self.tokenizer, *tables
        )
        scalars = self._get(scalars_ref, "cut answers into steps")
        return [(s, PromptRow(prompts_ref, i)) for i, s in enumerate(scalars)], answers_ref

    def annotate(
        self, answers_ref: Any, labels: Sequence[Label | None]
    ) -> tuple[dict[str, int], Any]:
        """(counts, reference of the table) of these answers. `labels`: one a prefix of `cut`."""
        counts_ref, table_ref = _task(_annotate, 2).remote(
            answers_ref, list(labels), self.tokenizer
        )
        return self._get(counts_ref, "write the annotations"), table_ref

    def fetch(self, table_ref: Any) -> pa.Table:
        """The table itself, to be written to a file."""
        return self._get(table_ref, "fetch the annotations")

    def _get(self, ref: Any, operation: str) -> Any:
        try:
            return get(ref, self.timeout_s, f"annotation: {operation}", HINT)
        except RayTaskError as error:
            raise error.cause from None  # what the task raised, without Ray's text


def _task(function: Any, returns: int) -> Any:
    return ray.remote(function).options(
        num_cpus=0, num_returns=returns, runtime_env={"env_vars": process_env()}
    )
