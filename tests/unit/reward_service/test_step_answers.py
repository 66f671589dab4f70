"""From ROLLOUT tables to annotations: steps, distinct prefixes and the rows of labelled answers."""

from __future__ import annotations

import math

import pyarrow as pa

from actors.data.prompt import make_prompt
from actors.modeling.tokenizer import build_tokenizer
from actors.records import PROMPT, ROLLOUT
from reward_service.step_labels.answers import (
    ANNOTATION,
    annotations,
    decoder,
    prefix_prompts,
    read_answers,
)

TOKENIZER = build_tokenizer()
DECODE = decoder(TOKENIZER)
SUM = make_prompt("12+34=?", "46", "short", data_source="arithmetic", task="math")
RIGHT = "<think>12+30=42+4=46</think><answer>46</answer>"
WRONG = "<think>12+30=42+4=47</think><answer>47</answer>"


def ids(text: str) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def rollout(*texts: str) -> pa.RecordBatch:
    n = len(texts)
    completions = [ids(text) for text in texts]
    return pa.RecordBatch.from_pydict(
        {
            "group_id": [0] * n,
            "prompt_id": [SUM.prompt_id] * n,
            "sample_index": list(range(n)),
            "prompt_ids": [[5, 6]] * n,
            "completion_ids": completions,
            "behaviour_logprobs": [[0.0] * len(c) for c in completions],
            "versions": [[0] * len(c) for c in completions],
            "finish_reason": ["stop"] * n,
        },
        schema=ROLLOUT,
    )


def read(*accuracy: float) -> list:
    return read_answers([SUM], accuracy, "running_sum", DECODE, [rollout(RIGHT, WRONG)])


def test_a_prefix_that_two_answers_share_is_one_prompt() -> None:
    scalars, prompts = prefix_prompts(read(1.0, 0.0), DECODE)
    texts = ["<think>12+30=42", "<think>12+30=42+4=46", "<think>12+30=42+4=47"]
    assert [s.prefill for s in scalars] == texts
    assert [s.tokens for s in scalars] == [len(ids(text)) - 1 for text in texts]
    assert prompts.schema.equals(PROMPT) and prompts.num_rows == 3
    assert prompts.column("prompt_ids")[0].as_py() == [5, 6, *ids(texts[0])[:-1]]


def test_a_row_holds_the_labels_of_the_prefixes_and_the_answers_own() -> None:
    labels = [(0.75, 1.0), (1.0, 1.0), (0.0, 0.0)]
    counts, table = annotations(read(1.0, 0.0), labels, DECODE)
    assert counts == {"answers": 2, "dropped": 0, "steps": 6}
    assert table.schema.equals(ANNOTATION)
    assert table.column("soft").to_pylist() == [[0.75, 1.0, 1.0], [0.75, 0.0, 0.0]]
    assert table.column("exact").to_pylist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    assert table.column("completion").to_pylist() == [RIGHT, WRONG]


def test_an_answer_with_a_step_of_no_label_is_dropped_and_counted() -> None:
    counts, table = annotations(read(1.0, 0.0), [(0.75, 1.0), (1.0, 1.0), None], DECODE)
    assert (counts["answers"], counts["dropped"], table.num_rows) == (1, 1, 1)
    counts, table = annotations(read(math.nan, math.nan), [(1.0, 1.0)] * 3, DECODE)
    assert (counts, table.num_rows) == ({"answers": 0, "dropped": 2, "steps": 0}, 0)
