"""Throughput and latency of the reward service, in one run: `python -m benchmarks.rewards` writes
results/rewards.json.

Ordinary answers: the pool against math-verify called in this process without protection (golds
parsed once each, as ours are) and in a fresh process per item. The ways take turns, so that a busy
machine disturbs all of them. Adversarial completions: one at a time through the pool, so that each
has a latency.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from benchmarks.reward_items import adversarial, ordinary
from benchmarks.run import RESULTS, commit, machine
from reward_service.math.extraction import gold_text
from reward_service.processes import RewardPool
from reward_service.rules.format import answer_block
from reward_service.rules.item import RewardItem

CONFIG = {"rules": {"accuracy": 1.0, "format": 1.0}, "timeout_s": 5.0}
FRESH = (
    "import sys; from math_verify import parse, verify\n"
    "print(verify(parse(sys.argv[1]), parse(sys.argv[2])))"
)


@lru_cache(maxsize=4096)
def _gold(text: str) -> Any:
    from math_verify import parse

    return parse(f"${text}$", parsing_timeout=None)


def in_process(items: list[RewardItem]) -> None:
    """math-verify without its alarm, the golds parsed once."""
    from math_verify import parse, verify

    for item in items:
        answer = parse(f"${answer_block(item.response)}$", parsing_timeout=None)
        verify(_gold(gold_text(item.gold)), answer, timeout_seconds=None)


def fresh_process(items: list[RewardItem]) -> None:
    """math-verify in a new interpreter for each item."""
    for item in items:
        command = [
            sys.executable,
            "-c",
            FRESH,
            f"${gold_text(item.gold)}$",
            f"${answer_block(item.response)}$",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def rate(score: Callable[[list[RewardItem]], Any], items: list[RewardItem]) -> float:
    """Items a second."""
    start = time.perf_counter()
    score(items)
    return len(items) / (time.perf_counter() - start)


def throughput(rounds: int, workers: int) -> dict[str, Any]:
    """Median items a second of each way, and the ratios of the pool to the others."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rates: dict[str, list[float]] = {"pool": [], "in_process": [], "fresh_process": []}
    in_process(ordinary(20, 4, 0))  # imports
    with RewardPool(CONFIG, workers) as pool:
        pool.score(ordinary(200, 8, 0))  # imports, in every worker
        for turn in range(1, rounds + 1):
            rates["pool"].append(rate(pool.score, ordinary(500, 8, turn)))
            rates["in_process"].append(rate(in_process, ordinary(100, 8, turn)))
            rates["fresh_process"].append(rate(fresh_process, ordinary(4, 1, turn)))
    median = {name: round(statistics.median(values), 2) for name, values in rates.items()}
    return {
        "workers": workers,
        "items_per_s": median,
        "pool_over_in_process": round(median["pool"] / median["in_process"], 2),
        "pool_over_fresh_process": round(median["pool"] / median["fresh_process"], 1),
    }


def attack(count: int, seed: int, workers: int) -> dict[str, Any]:
    """Statuses, wrong verdicts and latencies (ms) of adversarial completions, scored singly."""
    cases, waits, wrong, statuses = adversarial(count, seed), [], 0, Counter()
    with RewardPool(CONFIG, workers) as pool:
        for case in cases:
            start = time.perf_counter()
            [result] = pool.score([case.item])
            waits.append(1000 * (time.perf_counter() - start))
            statuses[result.status] += 1
            wrong += result.status == "ok" and result.parts["accuracy"] != case.accuracy
        deaths = pool.counts["worker_deaths"]
    cuts = statistics.quantiles(waits, n=1000)
    return {
        "items": count,
        "seed": seed,
        "statuses": dict(statuses),
        "wrong": wrong,
        "worker_deaths": deaths,
        "items_per_s": round(1000 * count / sum(waits), 1),
        "latency_ms": {
            "p50": round(cuts[499], 2),
            "p99": round(cuts[989], 2),
            "max": round(max(waits), 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=10_000, help="adversarial completions")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    record = {
        "command": f"python -m benchmarks.rewards {' '.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "machine": machine(),
        "ordinary": throughput(args.rounds, args.workers),
        "adversarial": attack(args.items, args.seed, args.workers),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rewards.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
