"""Command line: `python -m reward_service.main grade --completions FILE.jsonl` and `... serve`.

`grade` prints one line of JSON per item: id, accuracy, format, status, extracted, reason. `serve`
gives the same answers over HTTP (Ray Serve): POST /score with a list of items and `Authorization:
Bearer TOKEN`. It listens on the loopback interface by default.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from reward_service.processes import RewardPool
from reward_service.rows import read_items, result_row

DEFAULT_RULES = {"rules": {"accuracy": 1.0, "format": 1.0}, "timeout_s": 10.0}
BLOCK = 2048  # items read and graded at a time


def load_config(path: str | None) -> dict[str, Any]:
    """The reward config of a YAML file; without a path, the rules accuracy and format."""
    if path is None:
        return dict(DEFAULT_RULES)
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(OmegaConf.load(path), resolve=True))


def grade(args: argparse.Namespace) -> None:
    """Prints one line of JSON for each item of the file args.completions, in order."""
    with RewardPool(load_config(args.config), args.workers) as pool:
        items = read_items(Path(args.completions))
        while block := list(islice(items, BLOCK)):
            for item, result in zip(block, pool.score(block), strict=True):
                print(json.dumps(result_row(item, result)))
        failures = {status: count for status, count in pool.counts.items() if status != "ok"}
    if failures:
        print(f"not ok: {failures}", file=sys.stderr)


def read_token(path: str | None) -> str:
    """The token from the file `path`, or else from the environment variable VOLLEY_REWARD_TOKEN.

    Without either, a new token is written to `path`, readable by its owner only. Raises ValueError
    for a token shorter than 16 characters.
    """
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
    """Serves over HTTP until SIGINT or SIGTERM arrives."""
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
    """Entry point. Bad input ends with one line of error and exit code 2."""
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
