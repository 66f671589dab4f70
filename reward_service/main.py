"""Command line: `python -m reward_service.main grade --completions FILE.jsonl` and `... serve`.

grade prints one line of JSON per item: id, accuracy, format, status, extracted, reason. serve answers the same over
HTTP through Ray Serve: POST /score with a list of items, `Authorization: Bearer TOKEN`, on the loopback by default.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from reward_service.pool import RewardPool
from reward_service.rules.rules import RewardItem, RewardResult, format_reward

DEFAULT_RULES = {"rules": {"accuracy": 1.0, "format": 1.0}, "timeout_s": 10.0}
BLOCK = 2048  # items read and graded at a time
MAX_BODY = 64 * 2**20  # bytes of one HTTP request
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
    """A RewardItem from case-file fields; other fields become `extra`. Raises ValueError naming place and column."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for column in ("completion", "gold"):
        if column not in row:
            raise ValueError(
                f"{where}: column {column!r} is missing; it has {', '.join(map(repr, row)) or 'none'}"
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
    """Items of a JSON-lines file. Raises ValueError naming file, row (from 1) and column."""
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
    """What is printed and sent: accuracy is null if it was not determined (any status but ok)."""
    return {
        "id": item.id,
        "accuracy": result.parts.get("accuracy"),
        "format": format_reward(item.response),
        "status": result.status,
        "extracted": result.extracted,
        "reason": result.reason,
    }


def load_config(path: str | None) -> dict[str, Any]:
    """A reward config from YAML, or accuracy and format."""
    if path is None:
        return dict(DEFAULT_RULES)
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(OmegaConf.load(path), resolve=True))


def grade(args: argparse.Namespace) -> None:
    """Prints a line of JSON for each item of args.completions, in order."""
    with RewardPool(load_config(args.config), args.workers) as pool:
        items = read_items(Path(args.completions))
        while block := list(islice(items, BLOCK)):
            for item, result in zip(block, pool.score(block), strict=True):
                print(json.dumps(result_row(item, result)))
        failures = {status: count for status, count in pool.counts.items() if status != "ok"}
    if failures:
        print(f"not ok: {failures}", file=sys.stderr)


def read_token(path: str | None) -> str:
    """The token of the file, or of VOLLEY_REWARD_TOKEN; without either a new one, written to `path` for its owner."""
    if path and Path(path).is_file():
        token = Path(path).read_text().strip()
    elif os.environ.get("VOLLEY_REWARD_TOKEN"):
        token = os.environ["VOLLEY_REWARD_TOKEN"].strip()
    else:
        token, path = secrets.token_urlsafe(32), path or "reward_token"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
        print(f"wrote a new token to {path}", file=sys.stderr)
    if len(token) < 16:
        raise ValueError(
            "the reward token is shorter than 16 characters; expected a long random string"
        )
    return token


def serve(args: argparse.Namespace) -> None:
    """Serves until interrupted."""
    import ray
    from ray import serve as ray_serve

    from reward_service.http import deployment

    token, config = read_token(args.token_file), load_config(args.config)
    ray.init(
        address=args.address, ignore_reinit_error=True, include_dashboard=False, log_to_driver=True
    )
    ray_serve.start(http_options={"host": args.host, "port": args.port})
    ray_serve.run(deployment(config, args.workers, token), name="rewards", route_prefix="/")
    print(f"serving on http://{args.host}:{args.port}/score", file=sys.stderr, flush=True)
    try:
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def main(argv: list[str] | None = None) -> None:
    """Entry point; a bad input ends in one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m reward_service.main", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("grade", help="grade a JSON-lines file of completions")
    one.add_argument(
        "--completions", required=True, help="file with id, completion, gold, ... per line"
    )
    two = commands.add_parser("serve", help="serve over HTTP with Ray Serve")
    two.add_argument("--host", default="127.0.0.1")
    two.add_argument("--port", type=int, default=8300)
    two.add_argument("--token-file", help="file with the token; made if there is none")
    two.add_argument(
        "--address", help="of a running Ray cluster; a local one is started without it"
    )
    for command in (one, two):
        command.add_argument(
            "--config", help="a file of conf/reward; accuracy and format without it"
        )
        command.add_argument("--workers", type=int, default=2, help="scoring processes")
    args = parser.parse_args(argv)
    try:
        {"grade": grade, "serve": serve}[args.command](args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
