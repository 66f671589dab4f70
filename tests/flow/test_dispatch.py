"""Dispatch of groups over real Ray actors that stand in for generators: nothing is lost when one dies or hangs."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.records import SamplingParams
from actors.rollouts import Dispatcher

N = 3


class Standin:
    """Answers a request with its seeds, after `delay_s`."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    def generate(self, request: Any) -> tuple[Any, Any]:
        time.sleep(self.delay_s)
        return SimpleNamespace(group_id=request.group_id, seeds=request.seeds), None

    def pid(self) -> int:
        return os.getpid()


class Pool:
    def __init__(self, delays: list[float]) -> None:
        self.actors = [ray.remote(Standin).options(num_cpus=0).remote(d) for d in delays]
        self.restarts = 0

    def revive(self, index: int, why: Exception) -> None:
        self.restarts += 1
        ray.kill(self.actors[index])
        self.actors[index] = ray.remote(Standin).options(num_cpus=0).remote()
        ray.get(self.actors[index].pid.remote(), timeout=60)  # as the real pool does: ready before work is given

    def silent(self) -> list[Any]:
        return []

    def die(self, index: int) -> None:
        ray.kill(self.actors[index])


def submit(dispatcher: Dispatcher, ids: range) -> None:
    for i in ids:
        dispatcher.submit(i, SimpleNamespace(prompt_id=f"p{i}"), [1], N, SamplingParams(8), 0)


def drain(dispatcher: Dispatcher) -> dict[int, Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + 60
    while dispatcher.tickets:
        assert time.monotonic() < deadline
        for group in dispatcher.finished():
            assert group.meta.group_id not in found
            found[group.meta.group_id] = tuple(group.meta.seeds)
    return found


@pytest.fixture(scope="module")
def wanted(cluster: None) -> dict[int, Any]:
    dispatcher = Dispatcher(Pool([0.0]), 0, 60.0)
    submit(dispatcher, range(8))
    return drain(dispatcher)


def test_two_share_the_work_and_answer_alike(wanted: dict[int, Any]) -> None:
    pool = Pool([0.0, 0.0])
    dispatcher = Dispatcher(pool, 0, 60.0)
    submit(dispatcher, range(8))
    assert sorted(t.generator for t in dispatcher.tickets.values()) == [0] * 4 + [1] * 4
    assert drain(dispatcher) == wanted and pool.restarts == 0


def test_a_dead_one_is_replaced_once_and_its_groups_are_given_out_again(wanted: dict[int, Any]) -> None:
    pool = Pool([0.3, 0.0])
    dispatcher = Dispatcher(pool, 0, 60.0)
    submit(dispatcher, range(8))
    pool.die(0)
    assert drain(dispatcher) == wanted
    assert pool.restarts == 1


def test_two_dispatchers_do_not_replace_the_same_death_twice(wanted: dict[int, Any]) -> None:
    """Groups of training are under way while an evaluation notices the death (max_staleness > 0)."""
    pool = Pool([0.3])
    training, evaluation = Dispatcher(pool, 0, 60.0), Dispatcher(pool, 0, 60.0)
    submit(training, range(4))
    submit(evaluation, range(4, 8))
    pool.die(0)
    assert drain(evaluation) | drain(training) == wanted
    assert pool.restarts == 1


def test_one_that_hangs_past_the_deadline_is_replaced(wanted: dict[int, Any]) -> None:
    pool = Pool([100.0])
    dispatcher = Dispatcher(pool, 0, 1.0)
    submit(dispatcher, range(8))
    assert drain(dispatcher) == wanted
    assert pool.restarts == 1
