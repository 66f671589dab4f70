"""The data set `files`: prompts from JSON lines, Parquet, or a Hugging Face data set folder.

Two layouts are read. verl's layout: data_source, prompt (a chat list or a string), ability,
reward_model {style, ground_truth}, extra_info. The plain layout: two columns, named by
data.question_key and data.answer_key. Errors name the file, the row (from 1) and the column. Pure:
pyarrow and datasets are imported only when a file needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from actors.data.prompt import Prompt, make_prompt, stable_hash
from actors.data.stream import Dataset, Fits, Get

PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".json", ".ndjson")
# Columns of given answers, for SFT and DPO (actors/data/answers.py).
GIVEN = ("completion", "chosen", "rejected")
# verl's `ability` -> the verifier; every other ability is "math".
ABILITY_TASKS = {"code": "code", "coding": "code"}

Row = tuple[Path, int, dict[str, Any]]  # file, row number from 1, cells by column


class DataFileError(ValueError):
    """A file of prompts cannot be used.

    The message names the file, the row (from 1) and the column, and says what to do.
    """

    def __init__(
        self, path: Path, what: str, row: int | None = None, column: str | None = None
    ) -> None:
        row_text = "" if row is None else f", row {row}"
        column_text = f", column {column!r}" if column else ""
        super().__init__(f"{path}{row_text}{column_text}: {what}")


def files_dataset(get: Get, split: str, fits: Fits) -> Dataset:
    """The prompts of data.path; held out are those of data.heldout_path or, without it, some rows.

    Without data.heldout_path the data.heldout_size rows with the smallest hashes are held out,
    whatever their order in the file. Held-out questions never occur in training. Raises ValueError
    when a split would be empty, DataFileError when a file cannot be read.
    """
    path, heldout_path = get("path", ""), get("heldout_path", "")
    if not path:
        raise ValueError(
            "data.path is empty: data=files needs a JSON-lines file, a Parquet file or a data set "
            "folder"
        )
    keys = {
        "question_key": get("question_key", "question"),
        "answer_key": get("answer_key", "answer"),
        "template": get("template", "short"),
    }
    dropped = {"too_long": 0, "duplicate": 0, "heldout": 0}
    prompts = _usable(load_files(path, **keys), fits, dropped)
    if heldout_path:
        # What is left out of the held-out file is not counted as left out of the training data.
        counts = dropped if split == "heldout" else dict(dropped)
        heldout = _usable(load_files(heldout_path, **keys), fits, counts)
    else:
        heldout = _smallest_hashes(prompts, get("heldout_size", 64), get("seed", 0), path)
    questions = {prompt.question for prompt in heldout}
    train = [prompt for prompt in prompts if prompt.question not in questions]
    if split == "train":
        dropped["heldout"] = len(prompts) - len(train)
    chosen = heldout if split == "heldout" else train
    if not chosen:
        raise ValueError(
            f"data.path={path}: no {split} prompt left ({dropped}); raise data.max_prompt_tokens "
            "or check that data.heldout_path does not hold the same questions"
        )
    name = f"files/{path}/{split}/{stable_hash([p.prompt_id for p in chosen])}"
    return Dataset(name, len(chosen), chosen.__getitem__, dropped)


def _smallest_hashes(prompts: list[Prompt], size: int, seed: int, path: str) -> list[Prompt]:
    """The `size` prompts whose hashes are smallest. ValueError when none would be left to train."""
    if size >= len(prompts):
        raise ValueError(
            f"data.heldout_size={size}: {path} has only {len(prompts)} usable prompts and some "
            "must stay for training; lower it or give data.heldout_path"
        )
    return sorted(prompts, key=lambda p: stable_hash("heldout", seed, p.prompt_id))[:size]


def _usable(prompts: list[Prompt], fits: Fits, dropped: dict[str, int]) -> list[Prompt]:
    """Prompts that fit, without repeats, in order. Adds the others to the counts in `dropped`."""
    usable: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.prompt_id in usable:
            dropped["duplicate"] += 1
        elif not fits(prompt):
            dropped["too_long"] += 1
        else:
            usable[prompt.prompt_id] = prompt
    return list(usable.values())


def load_files(
    path: str | Path,
    *,
    template: str = "r1_zero",
    question_key: str = "question",
    answer_key: str = "answer",
) -> list[Prompt]:
    """All prompts of `path`, in file order.

    Raises DataFileError when the path is missing, empty or unreadable, or a cell cannot be used.
    """
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
    """The rows of a file or folder, in order. Raises DataFileError when it cannot be read."""
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
    """Rows of a folder written by datasets.Dataset.save_to_disk, or of the Parquet and JSON-lines
    files in a folder, which are read in the order of their names."""
    if (path / "state.json").is_file():
        from datasets import load_from_disk

        yield from ((path, i, row) for i, row in enumerate(load_from_disk(str(path)), start=1))
        return
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise DataFileError(
            path,
            f"holds several splits; name one: {', '.join(str(path / s) for s in splits)}",
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
    """Arguments of `make_prompt` for a row of the plain layout."""
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
    """Arguments of `make_prompt` for a row of verl's layout."""
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
    """The question in verl's `prompt` column: the string itself, or the system and user messages,
    joined by an empty line."""
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
    """The reference answer as text: strings unchanged, numbers and structures as JSON."""
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
