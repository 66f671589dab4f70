"""Dispatch of groups over real Ray actors that stand in for generators: nothing is lost when one
dies or hangs.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.records import SamplingParams
from actors.rollouts import Dispatcher
from cluster.stopping import RunError
from learner.stages.rl.group_queue import GroupQueue
from learner.stages.rl.groups import Refusals, admit, collect
from learner.state import State

N = 3


REFUSED = 100_003  # the group that the engine does not take


class Standin:
    """Answers a request with its seeds, after `delay_s`; refuses one as vLLM refuses a prompt that
    is too long.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    def generate(self, request: Any) -> tuple[Any, Any]:
        time.sleep(self.delay_s)
        if request.group_id == REFUSED:
            raise type("VLLMClientError", (Exception,), {"__module__": "vllm.exceptions"})(
                "prompt is too long"
            )
        return SimpleNamespace(group_id=request.group_id, seeds=request.seeds), None

    def pid(self) -> int:
        return os.getpid()


class Pool:
    def __init__(self, delays: list[float]) -> None:
        self.actors = [ray.remote(Standin).options(num_cpus=0).remote(d) for d in delays]
        self.restarts, self.look_s, self.epoch = 0, 5.0, 0

    def replace(self, index: int, why: Exception) -> None:
        self.restarts += 1
        ray.kill(self.actors[index])
        self.actors[index] = ray.remote(Standin).options(num_cpus=0).remote()
        ray.get(
            self.actors[index].pid.remote(), timeout=60
        )  # as the real pool does: ready before work is given

    @property
    def serving(self) -> list[int]:
        return [*range(len(self.actors))]

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


def test_a_dead_one_is_replaced_once_and_its_groups_are_given_out_again(
    wanted: dict[int, Any],
) -> None:
    pool = Pool([0.3, 0.0])
    dispatcher = Dispatcher(pool, 0, 60.0)
    submit(dispatcher, range(8))
    pool.die(0)
    assert drain(dispatcher) == wanted
    assert pool.restarts == 1


def test_two_dispatchers_do_not_replace_the_same_death_twice(wanted: dict[int, Any]) -> None:
    """Groups of training are in flight when an evaluation notices the death (max_staleness > 0)."""
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


def test_a_refused_group_is_dropped_with_the_reason(cluster: None) -> None:
    told: list[tuple[int, str]] = []
    pool = Pool([0.0])
    dispatcher = Dispatcher(pool, 0, 60.0, lambda *what: told.append(what))
    submit(dispatcher, range(REFUSED - 1, REFUSED + 2))
    assert set(drain(dispatcher)) == {REFUSED - 1, REFUSED + 1}
    assert told == [(REFUSED, "VLLMClientError: prompt is too long")] and pool.restarts == 0


def test_a_refused_group_stops_what_must_be_whole(cluster: None) -> None:
    """An evaluation on fewer prompts than asked would be another measure."""
    dispatcher = Dispatcher(Pool([0.0]), 0, 60.0)
    submit(dispatcher, range(REFUSED, REFUSED + 1))
    with pytest.raises(ray.exceptions.RayTaskError, match="prompt is too long"):
        drain(dispatcher)


class Offline:
    """A dispatcher that finishes all it was given, but for the groups it refuses."""

    def __init__(self, drop: Any, refused: range) -> None:
        self.drop, self.refused, self.waiting = drop, refused, []

    def submit(self, group_id: int, *_: Any) -> None:
        self.waiting.append(group_id)

    def finished(self) -> Any:
        given, self.waiting = self.waiting, []
        for group_id in given:
            if group_id in self.refused:
                self.drop(group_id, "too long")
            else:
                yield SimpleNamespace(meta=SimpleNamespace(group_id=group_id))


def run_with(refused: range) -> tuple[Any, State]:
    """As much of a run as admits and collects, and its state; 4 groups a step."""
    cfg = SimpleNamespace(
        seed=0,
        rollout=SimpleNamespace(
            prompts_per_step=4, group_size=2, max_staleness=0, timeout_s=60.0,
            max_tokens=8, temperature=1.0, top_p=1.0, top_k=0,
        ),
        algorithm=SimpleNamespace(data="policy"),
    )  # fmt: skip
    policy = SimpleNamespace(encode=lambda text: [1])
    queue = GroupQueue(cfg, policy, None, SimpleNamespace(submit=lambda group: None))
    queue.dispatcher = Offline(queue.refuse, refused)
    prompt = SimpleNamespace(text="")
    sampler = SimpleNamespace(next=lambda n: [prompt] * n, state=dict)
    run = SimpleNamespace(
        cfg=cfg,
        groups=queue,
        data=SimpleNamespace(sampler=sampler),
        progress=SimpleNamespace(note=lambda text: None),
    )
    return run, State()


def test_others_come_in_place_of_refused_groups_and_the_books_balance() -> None:
    run, state = run_with(range(1, 4))
    admit(run, state, 4)
    groups = collect(run, state, 4, 0, Refusals(run, state))
    assert [g.meta.group_id for g in groups] == [0, 4, 5, 6]
    state.ledger.check()
    assert state.ledger.counts() == {
        "admitted": 7,
        "trained": 0,
        "filtered": 3,
        "in_flight": 0,
        "queued": 4,
    }
    assert set(state.waiting) == {0, 4, 5, 6}


def test_data_of_which_nothing_is_taken_ends_the_run() -> None:
    run, state = run_with(range(10_000))
    admit(run, state, 4)
    with pytest.raises(RunError, match="5 prompts of one step were refused .*too long"):
        collect(run, state, 4, 0, Refusals(run, state))
