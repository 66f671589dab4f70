"""Prompts from files: JSON lines, Parquet, or a Hugging Face data set folder.

Two layouts are read. verl's: data_source, prompt (a chat list or a string), ability, reward_model {style,
ground_truth}, extra_info. Plain: two columns named by question_key and answer_key. Errors name file, row and column;
rows count from 1, as lines do in an editor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from actors.data.prompts import Prompt, make_prompt

PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".json", ".ndjson")
GIVEN = (
    "completion",
    "chosen",
    "rejected",
)  # columns of given answers, for SFT and DPO (actors/data/given.py)
ABILITY_TASKS = {
    "code": "code",
    "coding": "code",
}  # verl's `ability` -> the verifier; everything else is "math"

Row = tuple[Path, int, dict[str, Any]]  # file, row from 1, cells


class DataFileError(ValueError):
    """A file of prompts cannot be used. The message names file, row (from 1) and column, and says what to do."""

    def __init__(
        self, path: Path, what: str, row: int | None = None, column: str | None = None
    ) -> None:
        place = "".join(
            (f", row {row}" if row is not None else "", f", column {column!r}" if column else "")
        )
        super().__init__(f"{path}{place}: {what}")


def load_files(
    path: str | Path,
    *,
    template: str = "r1_zero",
    question_key: str = "question",
    answer_key: str = "answer",
) -> list[Prompt]:
    """All prompts of `path`, in file order. DataFileError: not there, empty, not readable, a cell missing or odd."""
    path = Path(path).expanduser()
    prompts = []
    for file, number, row in rows(path):
        reader = _verl_row if "prompt" in row and "reward_model" in row else _plain_row
        fields = reader(file, number, row, question_key, answer_key)
        prompts.append(make_prompt(template=template, **fields))
    if not prompts:
        raise DataFileError(path, "has no rows; expected at least one prompt")
    return prompts


def rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        raise DataFileError(path, "no such file or folder; check data.path")
    if path.is_dir():
        return _folder_rows(path)
    if path.suffix in PARQUET:
        return _parquet_rows(path)
    if path.suffix in JSON_LINES:
        return _json_rows(path)
    raise DataFileError(
        path,
        f"unknown kind {path.suffix or '(no suffix)'!r}; expected "
        f"{', '.join((*JSON_LINES, *PARQUET))} or a Hugging Face data set folder",
    )


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataFileError(
                    path, f"not JSON ({error.msg}); expected one object a line", number
                ) from error
            if not isinstance(row, dict):
                raise DataFileError(
                    path, f"a JSON {type(row).__name__}; expected one object a line", number
                )
            yield path, number, row


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(1024))
            yield from (
                (path, i, row) for i, row in enumerate(chain.from_iterable(batches), start=1)
            )
    except pa.ArrowInvalid as error:
        raise DataFileError(path, f"not a readable Parquet file ({error})") from error


def _folder_rows(path: Path) -> Iterator[Row]:
    """A folder made by datasets.Dataset.save_to_disk, or one of Parquet and JSON-lines files read in name order."""
    if (path / "state.json").is_file():
        from datasets import load_from_disk

        yield from ((path, i, row) for i, row in enumerate(load_from_disk(str(path)), start=1))
        return
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise DataFileError(
            path, f"holds several splits; name one: {', '.join(str(path / s) for s in splits)}"
        )
    files = sorted(f for f in path.iterdir() if f.suffix in (*PARQUET, *JSON_LINES))
    if not files:
        raise DataFileError(
            path, "holds neither a saved Hugging Face data set nor Parquet or JSON-lines files"
        )
    for file in files:
        yield from rows(file)


def _plain_row(
    path: Path, number: int, row: dict[str, Any], question_key: str, answer_key: str
) -> dict[str, Any]:
    for key, setting in ((question_key, "data.question_key"), (answer_key, "data.answer_key")):
        if key not in row:
            raise DataFileError(
                path,
                f"missing; the row has {', '.join(map(repr, row)) or 'nothing'}. "
                f"Set {setting} to the column to read",
                number,
                key,
            )
    question = row[question_key]
    if not isinstance(question, str) or not question.strip():
        raise DataFileError(
            path, f"{question!r}; expected a question as text", number, question_key
        )
    return {
        "question": question,
        "gold": _gold(path, number, row[answer_key], answer_key),
        "data_source": str(row.get("data_source") or path.stem),
        "task": str(row.get("task") or "math"),
        "extra": {
            **_extra(path, number, row.get("extra_info")),
            **{c: row[c] for c in GIVEN if c in row},
        },
    }


def _verl_row(path: Path, number: int, row: dict[str, Any], *_: str) -> dict[str, Any]:
    reward_model = row["reward_model"]
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise DataFileError(
            path, f"{reward_model!r}; expected an object with ground_truth", number, "reward_model"
        )
    source = str(row.get("data_source") or path.stem)
    task = (
        "countdown"
        if "countdown" in source.lower()
        else ABILITY_TASKS.get(str(row.get("ability")).lower(), "math")
    )
    return {
        "question": _chat_question(path, number, row["prompt"]),
        "data_source": source,
        "task": task,
        "gold": _gold(path, number, reward_model["ground_truth"], "reward_model.ground_truth"),
        "extra": _extra(path, number, row.get("extra_info")),
    }


def _chat_question(path: Path, number: int, prompt: Any) -> str:
    """The question in verl's `prompt`: the string itself, or the system and user messages joined by an empty line."""
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataFileError(
            path, f"{prompt!r}; expected text or a list of messages", number, "prompt"
        )
    texts = []
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise DataFileError(
                path, f"{message!r}; expected a message with role and content", number, "prompt"
            )
        if message.get("role") not in ("system", "user"):
            raise DataFileError(
                path,
                f"a message of role {message.get('role')!r}; only a question (system and user "
                "messages) can be asked, not a conversation",
                number,
                "prompt",
            )
        texts.append(message["content"])
    return "\n\n".join(texts)


def _gold(path: Path, number: int, value: Any, column: str) -> str:
    """The reference answer as text: strings as they are, numbers and structures as JSON."""
    if value is None or value == "":
        raise DataFileError(path, "empty; expected the reference answer", number, column)
    return value if isinstance(value, str) else _json(path, number, value, column)


def _extra(path: Path, number: int, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataFileError(
            path, f"a {type(value).__name__}; expected an object", number, "extra_info"
        )
    return json.loads(_json(path, number, value, "extra_info"))


def _json(path: Path, number: int, value: Any, column: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise DataFileError(path, f"cannot be written as JSON ({error})", number, column) from error
