"""Files of labelled answers: every layout, faults named by file, row, column; and back again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.data.files import DataFileError
from actors.modeling.tokenizer import build_tokenizer
from actors.records import LABELLED, RecordError, check_labelled
from reward_service.models.labelled import of_record, read, record

TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_every_layout(tmp_path: Path) -> None:
    batch, dropped = read(
        lines(
            tmp_path / "a.jsonl",
            {"prompt": "1+1=?", "completion": "2", "label": True},
            {"prompt": "1+1=?", "completion": "3", "label": 0.25},
            {"prompt": "1+1=?", "completions": ["1+1=", "2"], "labels": [1, False]},
            {"prompt": "1+1=?", "chosen": "2", "rejected": "11"},
            {
                "prompt_ids": [9],
                "completion_ids": [8, 7, EOS],
                "ends": [0, 2],
                "soft": [0.5, 1.0],
                "hard": [1, 1],
                "prompt_id": "x",
            },
        ),
        TOKENIZER,
    )
    assert dropped == 0 and batch.num_rows == 6
    assert batch.column("completion_ids").to_pylist() == [
        [*ids("2"), EOS],
        [*ids("3"), EOS],
        [*ids("1+1=2"), EOS],
        [*ids("2"), EOS],
        [*ids("11"), EOS],
        [8, 7, EOS],
    ]
    assert batch.column("ends").to_pylist() == [[1], [1], [3, 5], [1], [2], [0, 2]]
    assert batch.column("labels").to_pylist() == [
        [1.0],
        [0.25],
        [1.0, 0.0],
        [1.0],
        [0.0],
        [0.5, 1.0],
    ]
    assert batch.column("pair").to_pylist() == [-1, -1, -1, 0, 0, -1]
    names = batch.column("prompt_id").to_pylist()
    assert len(set(names[:5])) == 1 and names[5] == "x"  # one prompt, however it is stored
    assert set(map(tuple, batch.column("prompt_ids").to_pylist()[:5])) == {tuple(ids("1+1=?"))}


def test_hard_labels_and_answers_that_are_too_long(tmp_path: Path) -> None:
    row = {
        "prompt_ids": [9, 9],
        "completion_ids": [8, 7, EOS],
        "ends": [0, 2],
        "soft": [0.5, 1.0],
        "hard": [1, 0],
    }
    pq.write_table(
        pa.Table.from_pylist([row, row | {"completion_ids": [8] * 9}]), tmp_path / "a.parquet"
    )
    batch, dropped = read(tmp_path / "a.parquet", TOKENIZER, "hard", max_tokens=10)
    assert dropped == 1 and batch.column("labels").to_pylist() == [[1.0, 0.0]]
    with pytest.raises(DataFileError, match="no usable row"):
        read(tmp_path / "a.parquet", TOKENIZER, max_tokens=4)


@pytest.mark.parametrize(
    "row, wanted",
    [
        ({"prompt": "1", "completion": "2"}, "row 1, column 'label': missing"),
        ({"prompt": "1", "completion": "2", "label": 3}, "row 1, column 'label'.*in \\[0, 1\\]"),
        ({"prompt": "1", "completion": "2", "label": "good"}, "row 1, column 'label'"),
        ({"completion": "2", "label": 1}, "row 1, column 'prompt': missing"),
        ({"prompt": "1", "completions": ["a", "b"], "labels": [1]}, "1 labels of 2 steps"),
        ({"prompt": "1", "chosen": "2", "rejected": None}, "row 1, column 'rejected': missing"),
        ({"prompt": "1", "chosen": "2", "rejected": ""}, "empty step or answer"),
        (
            {"prompt_ids": [1], "completion_ids": [2], "ends": [0], "hard": [1]},
            "column 'soft': missing",
        ),
    ],
)
def test_what_is_odd_is_named(tmp_path: Path, row: dict[str, Any], wanted: str) -> None:
    with pytest.raises(DataFileError, match=wanted) as error:
        read(lines(tmp_path / "a.jsonl", row), TOKENIZER)
    assert str(tmp_path / "a.jsonl") in str(error.value)


def test_record_and_back(tmp_path: Path) -> None:
    batch, _ = read(
        lines(
            tmp_path / "a.jsonl",
            {"prompt": "1+1=?", "chosen": "2", "rejected": "11"},
            {"prompt": "5", "completion": "6", "label": 1},
        ),
        TOKENIZER,
    )
    answers = of_record(batch, "ref")
    assert answers.tokens.tolist() == [7, 8, 3] and answers.tables == ["ref"]
    again = record(answers.take([2, 0]), [batch], 3)
    assert again.column("completion_ids").to_pylist() == [[*ids("6"), EOS], [*ids("2"), EOS]]
    assert again.column("iteration").to_pylist() == [3, 3] and again.schema == LABELLED


@pytest.mark.parametrize(
    "ends, labels", [([1, 0], [1, 1]), ([0, 3], [1, 1]), ([0], [1, 0]), ([], []), ([0], [1.5])]
)
def test_a_record_that_does_not_hold_together_is_refused(
    ends: list[int], labels: list[float]
) -> None:
    row = {
        "prompt_id": "p",
        "prompt_ids": [1],
        "completion_ids": [2, 3, 4],
        "ends": ends,
        "labels": labels,
        "pair": -1,
        "iteration": 0,
    }
    with pytest.raises(RecordError, match="row 0"):
        check_labelled(pa.RecordBatch.from_pylist([row], schema=LABELLED))
