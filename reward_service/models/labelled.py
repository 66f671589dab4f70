"""Labelled answers: reads files of them as LABELLED records, and holds their scalars in the driver.

A file has one of these sets of columns, which are named as in TRL's data sets. `prompt` is the
rendered text, as the policy sees it. The end-of-text token is added to every answer.

    prompt, completion, label            outcome: label true, false or in [0, 1]
    prompt, completions, labels          process: a text and a label for each step
    prompt, chosen, rejected             pairs: outcome labels 1 and 0
    prompt_ids, completion_ids, ends, labels | soft | hard     token ids, from stage=annotate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from actors.data.files import DataFileError, rows
from actors.records import LABELLED, GroupMeta, check_labelled, list_lengths

TOKEN_FORM = ("prompt_ids", "completion_ids", "ends")


@dataclass(frozen=True)
class Answers:
    """N labelled answers without their tokens. Arrays are int64 [N].

    `tables` are references to records with the columns prompt_ids and completion_ids. Answer i is
    row `row[i]` of table `table[i]`, and has `tokens[i]` tokens with its prompt. `prompt_ids` names
    the prompt of each answer. `ends` holds the index of the last token of each step, and `labels` a
    label for each. Two answers with the same number in `pair` form a pair; -1 means no pair.
    """

    tables: list[Any]
    table: np.ndarray
    row: np.ndarray
    tokens: np.ndarray
    prompt_ids: list[str]
    ends: list[list[int]]
    labels: list[list[float]]
    pair: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def take(self, chosen: np.ndarray) -> Answers:
        """The answers at these indices, in that order."""
        return replace(
            self,
            table=self.table[chosen],
            row=self.row[chosen],
            tokens=self.tokens[chosen],
            prompt_ids=[self.prompt_ids[i] for i in chosen],
            ends=[self.ends[i] for i in chosen],
            labels=[self.labels[i] for i in chosen],
            pair=self.pair[chosen],
        )

    def __add__(self, other: Answers) -> Answers:
        past = (
            int(self.pair.max(initial=-1)) + 1
        )  # so that the pairs of both keep different numbers
        return Answers(
            self.tables + other.tables,
            np.concatenate([self.table, other.table + len(self.tables)]),
            np.concatenate([self.row, other.row]),
            np.concatenate([self.tokens, other.tokens]),
            self.prompt_ids + other.prompt_ids,
            self.ends + other.ends,
            self.labels + other.labels,
            np.concatenate([self.pair, np.where(other.pair < 0, -1, other.pair + past)]),
        )


def of_record(batch: pa.RecordBatch, ref: Any) -> Answers:
    """The answers of a LABELLED record, without their tokens; `ref` refers to the record."""
    n = batch.num_rows
    tokens = list_lengths(batch.column("prompt_ids")) + list_lengths(batch.column("completion_ids"))
    return Answers(
        [ref],
        np.zeros(n, np.int64),
        np.arange(n),
        tokens,
        batch.column("prompt_id").to_pylist(),
        batch.column("ends").to_pylist(),
        batch.column("labels").to_pylist(),
        batch.column("pair").to_numpy(),
    )


def of_samples(
    metas: Sequence[GroupMeta], tables: list[Any], accuracy: np.ndarray, pairs: bool = False
) -> Answers:
    """Samples of a policy, each labelled with its accuracy (float [N]).

    A sample with accuracy nan was not judged and is left out. With `pairs`, the right and wrong
    samples of each group are paired in sample order, and samples without a partner are left out.
    """
    selected: list[tuple[int, int, int, float, int]] = []
    start = count = 0
    for t, meta in enumerate(metas):
        n = len(meta.lengths)
        known = [i for i in range(n) if not np.isnan(accuracy[start + i])]
        right = [i for i in known if accuracy[start + i] >= 1]
        wrong = [i for i in known if accuracy[start + i] < 1]
        if pairs:
            for couple in zip(right, wrong, strict=False):
                selected += [
                    (t, i, int(meta.lengths[i]), label, count)
                    for i, label in zip(couple, (1.0, 0.0), strict=True)
                ]
                count += 1
        else:
            selected += [(t, i, int(meta.lengths[i]), float(i in right), -1) for i in known]
        start += n
    table, row, length, label, pair = (
        (np.array(c) for c in zip(*selected, strict=True)) if selected else [np.empty(0)] * 5
    )
    table = table.astype(np.int64)
    prompt = np.array([m.prompt_tokens for m in metas], np.int64)
    return Answers(
        tables,
        table,
        row.astype(np.int64),
        prompt[table] + length.astype(np.int64),
        [metas[t].prompt_id for t in table],
        [[int(n) - 1] for n in length],
        [[float(v)] for v in label],
        pair.astype(np.int64),
    )


def record(answers: Answers, tables: Sequence[pa.RecordBatch], iteration: int) -> pa.RecordBatch:
    """The LABELLED record of `answers` and the `tables` they refer to. Raises RecordError."""
    columns = {name: [t.column(name) for t in tables] for name in ("prompt_ids", "completion_ids")}
    token_columns = {
        name: [
            column[t][r].as_py() for t, r in zip(answers.table, answers.row.tolist(), strict=True)
        ]
        for name, column in columns.items()
    }
    n = len(answers)
    return check_labelled(
        pa.RecordBatch.from_pydict(
            {
                "prompt_id": answers.prompt_ids,
                **token_columns,
                "ends": answers.ends,
                "labels": answers.labels,
                "pair": answers.pair,
                "iteration": np.full(n, iteration),
            },
            schema=LABELLED,
        )
    )


def read(
    path: str | Path, tokenizer: Any, label: str = "soft", max_tokens: int = 0
) -> tuple[pa.RecordBatch, int]:
    """(LABELLED record, number of answers left out) of a file or folder.

    Answers with more than `max_tokens` tokens, prompt included, are left out; 0 means no limit.
    `label` names the column of labels (soft or hard) if a file has both. Raises DataFileError
    naming file, row and column.
    """
    out: dict[str, list[Any]] = {name: [] for name in LABELLED.names}
    dropped = pairs = 0
    for file, number, cells in rows(Path(path).expanduser()):
        answers = _answers(file, number, cells, tokenizer, label)
        if max_tokens and any(len(p) + len(c) > max_tokens for p, c, _, _ in answers):
            dropped += len(answers)
            continue
        name = cells.get("prompt_id") or xxhash.xxh3_64_hexdigest(repr(answers[0][0]).encode())
        for prompt, completion, ends, labels in answers:
            values = (
                name,
                prompt,
                completion,
                ends,
                labels,
                pairs if len(answers) > 1 else -1,
                cells.get("iteration", 0),
            )
            for column, value in zip(LABELLED.names, values, strict=True):
                out[column].append(value)
        pairs += len(answers) > 1
    if not out["labels"]:
        raise DataFileError(Path(path), f"holds no usable row ({dropped} over {max_tokens} tokens)")
    return check_labelled(pa.RecordBatch.from_pydict(out, schema=LABELLED)), dropped


def _answers(
    file: Path, number: int, cells: dict[str, Any], tokenizer: Any, label: str
) -> list[tuple[list[int], list[int], list[int], list[float]]]:
    """(prompt ids, completion ids, ends, labels) of the answers of a row.

    A row has one answer, or a pair with the chosen answer first.
    """
    if all(c in cells for c in TOKEN_FORM):
        column = "labels" if "labels" in cells else label
        return [
            (
                *(list(_cell(file, number, cells, c)) for c in TOKEN_FORM),
                _labels(file, number, column, _cell(file, number, cells, column)),
            )
        ]
    prompt = list(tokenizer(str(_cell(file, number, cells, "prompt")))["input_ids"])
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt.pop()

    def tokens(*texts: str) -> tuple[list[int], list[int]]:
        parts = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
        if not all(parts):
            raise DataFileError(file, "an empty step or answer", number)
        parts[-1] = [*parts[-1], tokenizer.eos_token_id]
        return [i for p in parts for i in p], (np.cumsum([len(p) for p in parts]) - 1).tolist()

    if "chosen" in cells:
        pair = [str(_cell(file, number, cells, c)) for c in ("chosen", "rejected")]
        return [
            (prompt, *tokens(text), [value]) for text, value in zip(pair, (1.0, 0.0), strict=True)
        ]
    if "completions" in cells:
        steps = [str(s) for s in _cell(file, number, cells, "completions")]
        labels = _labels(file, number, "labels", _cell(file, number, cells, "labels"))
        if len(labels) != len(steps) or not steps:
            raise DataFileError(
                file,
                f"{len(labels)} labels of {len(steps)} steps; expected one a step",
                number,
                "labels",
            )
        return [(prompt, *tokens(*steps), labels)]
    text, value = (_cell(file, number, cells, c) for c in ("completion", "label"))
    return [(prompt, *tokens(str(text)), _labels(file, number, "label", [value]))]


def _cell(file: Path, number: int, cells: dict[str, Any], column: str) -> Any:
    value = cells.get(column)
    if value is None:
        raise DataFileError(
            file,
            f"missing; the row has {', '.join(map(repr, cells)) or 'nothing'}. Expected one of "
            "the column sets of reward_service/models/labelled.py (docs/rewards.md)",
            number,
            column,
        )
    return value


def _labels(file: Path, number: int, column: str, values: Any) -> list[float]:
    try:
        labels = [float(v) for v in values]
    except (TypeError, ValueError):
        labels = [-1.0]
    if not all(0.0 <= v <= 1.0 for v in labels):
        raise DataFileError(
            file, f"{values!r}; expected true, false or numbers in [0, 1]", number, column
        )
    return labels
