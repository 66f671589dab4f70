"""Items as JSON: rows of a file for the command line, and the body of an HTTP request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reward_service.rules.format import format_reward
from reward_service.rules.item import RewardItem, RewardResult

_FIELDS = {
    "id": str,
    "completion": str,
    "gold": str,
    "prefill": str,
    "task": str,
    "prompt": str,
    "data_source": str,
    "repeat": dict,
    "completion_tokens": int,
    "max_tokens": int,
    "truncated": bool,
}


def item_of(row: Any, where: str, number: int = 0) -> RewardItem:
    """The RewardItem of one JSON object; fields without a meaning of their own become `extra`.

    Raises ValueError naming `where` the row is from and the column at fault.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for column in ("completion", "gold"):
        if column not in row:
            raise ValueError(
                f"{where}: column {column!r} is missing; "
                f"it has {', '.join(map(repr, row)) or 'none'}"
            )
    for column, kind in _FIELDS.items():
        if row.get(column) is not None and not isinstance(row[column], kind):
            raise ValueError(
                f"{where}: column {column!r} is {row[column]!r:.80}; expected {kind.__name__}"
            )
    repeat = row.get("repeat") or {}
    text = (
        (row.get("prefill") or "")
        + row["completion"]
        + repeat.get("text", "") * int(repeat.get("times", 0))
        + repeat.get("then", "")
    )
    extra = {key: value for key, value in row.items() if key not in _FIELDS}
    plain = {
        key: row[key]
        for key in ("task", "prompt", "data_source", "completion_tokens", "max_tokens", "truncated")
        if row.get(key) is not None
    }
    return RewardItem(
        id=row.get("id") or str(number), response=text, gold=row["gold"] or "", extra=extra, **plain
    )


def read_items(path: Path) -> Iterator[RewardItem]:
    """The items of a JSON-lines file. Raises ValueError naming file, row (from 1) and column."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        count = 0
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, row {number}: not JSON: {error}") from error
            count += 1
            yield item_of(row, f"{path}, row {number}", number)
    if not count:
        raise ValueError(f"{path} holds no rows; expected one JSON object a line")


def result_row(item: RewardItem, result: RewardResult) -> dict[str, Any]:
    """The fields that `grade` prints and `serve` sends; accuracy is null if undetermined."""
    return {
        "id": item.id,
        "accuracy": result.parts.get("accuracy"),
        "format": format_reward(item.response),
        "status": result.status,
        "extracted": result.extracted,
        "reason": result.reason,
    }
