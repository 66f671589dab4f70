"""Supervision over real Ray actors that do nothing else: dead and hung ones are replaced, within
the budget only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from actors import rollout_log
from cluster.supervision.failures import LearnerLost
from cluster.supervision.health import RestartsExhausted
from cluster.supervision.remote import DeadlineExceeded, get
from cluster.supervision.supervisor import Process, Supervised, end_process, here, ping, pingable
from conf.schema import ClusterConfig

WAIT_S = 60.0


class Worker:
    def __init__(self, generation: int = 0, broken_from: int = 99, dies_at: int = 99) -> None:
        if generation >= broken_from:
            raise ValueError("no such setting")
        if generation == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.generation = generation

    def work(self) -> int:
        return self.generation

    def load(self) -> None:
        """As where weights are fetched whose publisher is gone: Ray frees them when it sees fit."""
        raise ray.exceptions.OwnerDiedError("00", "", "")

    def refuse(self) -> None:
        raise ValueError("a bug")


class Pair:
    """What the tests need of one Supervised: `n` workers, each told which generation it is of."""

    def __init__(self, n: int = 1, restarts: int = 2, **arguments: int) -> None:
        self.generation, self.n, self.arguments = -1, n, arguments
        cluster = ClusterConfig(restarts=restarts, restart_backoff_s=0.2, probe_timeout_s=2.0)
        self.member = Supervised(
            "worker-0", self.create, cluster, "cluster.restarts", restarts, WAIT_S, "the log", ping
        )

    def create(self, suffix: str) -> list[Any]:
        self.generation += 1
        worker = pingable(Worker).options(num_cpus=0)
        return [worker.remote(self.generation, **self.arguments) for _ in range(self.n)]

    def ask(self) -> int:
        return self.member.wait(self.member.actor.work.remote(), WAIT_S, "worker-0: work")


@pytest.fixture
def made(cluster: None) -> Iterator[Any]:
    pairs: list[Pair] = []

    def make(*args: int, **arguments: int) -> Pair:
        pairs.append(Pair(*args, **arguments))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.member.end()


def gone(process: Process) -> bool:
    return (
        not psutil.pid_exists(process.pid)
        or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    )


def lost(pair: Pair) -> Exception:
    with pytest.raises((ray.exceptions.RayActorError, DeadlineExceeded)) as found:
        pair.ask()
    return found.value


def test_a_dead_one_is_replaced_and_all_that_belong_to_it(made: Any) -> None:
    pair = made(2)
    pair.member.start()
    first = list(pair.member.processes)
    assert len({p.pid for p in first}) == 2 and pair.ask() == 0
    os.kill(first[0].pid, signal.SIGKILL)
    caught_up = pair.member.replace(lost(pair), lambda: "caught up")
    assert caught_up == "caught up" and pair.ask() == 1
    assert all(gone(p) for p in first)
    assert pair.member.health.state == "healthy" and pair.member.health.restarts == 1


def test_one_that_is_stopped_is_found_by_its_pings_and_is_really_gone(
    made: Any, capsys: Any
) -> None:
    pair = made()
    pair.member.start()
    process = pair.member.processes[0]
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    error = lost(pair)
    assert (
        2.0 <= time.monotonic() - began < 6.0
    )  # probe_timeout_s is 2, and not the minute that the work may take
    assert "cluster.probe_timeout_s=2" in str(error)
    pair.member.replace(error)
    assert gone(process) and pair.ask() == 1
    told = capsys.readouterr().out
    assert "worker-0 is suspect" in told and "worker-0 is healthy again" in told


def test_end_ends_a_stopped_one(made: Any) -> None:
    pair = made()
    pair.member.start()
    process = pair.member.processes[0]
    os.kill(process.pid, signal.SIGSTOP)
    pair.member.end()
    assert gone(process)


def test_a_number_that_another_process_has_by_now_is_let_live() -> None:
    me = Process("node", os.getpid(), psutil.Process().create_time() - 1)
    end_process(me)  # else this test would end here


def test_it_is_replaced_until_the_budget_is_used_up(made: Any) -> None:
    pair = made(restarts=2)
    pair.member.start()
    for generation in range(2):
        os.kill(pair.member.processes[0].pid, signal.SIGKILL)
        pair.member.replace(lost(pair))
        assert pair.ask() == generation + 1
    os.kill(pair.member.processes[0].pid, signal.SIGKILL)
    with pytest.raises(RestartsExhausted, match=r"worker-0 .*cluster\.restarts=2"):
        pair.member.replace(lost(pair))
    assert pair.member.health.state == "dead"


def test_one_that_dies_while_it_starts_again_is_started_once_more(made: Any) -> None:
    pair = made(dies_at=1)
    pair.member.start()
    os.kill(pair.member.processes[0].pid, signal.SIGKILL)
    pair.member.replace(lost(pair))
    assert pair.ask() == 2 and pair.member.health.restarts == 2


def test_a_constructor_that_raises_is_not_tried_again(made: Any) -> None:
    with pytest.raises(ray.exceptions.RayActorError, match="no such setting"):
        made(broken_from=0).member.start()
    pair = made(broken_from=1)
    pair.member.start()
    os.kill(pair.member.processes[0].pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError, match="no such setting"):
        pair.member.replace(lost(pair))
    assert pair.generation == 1


def test_what_is_no_loss_of_the_actor_is_raised_as_it_is(made: Any) -> None:
    pair = made()
    pair.member.start()
    with pytest.raises(ValueError, match="a bug") as found:
        get(pair.member.actor.refuse.remote(), WAIT_S, "worker-0: refuse")
    with pytest.raises(ValueError, match="a bug"):
        pair.member.replace(found.value)
    assert pair.ask() == 0 and pair.member.health.restarts == 0


def test_objects_that_died_with_their_owner_are_the_learners_loss(made: Any) -> None:
    """Weights die with the rank that published them; whoever fetches them is not to blame."""
    pair = made()
    pair.member.start()
    with pytest.raises(LearnerLost, match="worker-0 was given what is gone"):
        try:
            get(pair.member.actor.load.remote(), WAIT_S, "worker-0: load")
        except Exception as error:
            pair.member.replace(error)
    assert pair.ask() == 0 and pair.member.health.restarts == 0


def test_where_it_runs(made: Any) -> None:
    pair = made()
    pair.member.start()
    found = pair.member.processes[0]
    assert psutil.Process(found.pid).create_time() == found.created and found.node == here().node


class Writer:
    """Has no room for step 2, and dies at step 3, once."""

    def __init__(self, directory: str, _: str) -> None:
        self.directory = Path(directory)

    def write(self, step: int, *_: Any) -> None:
        died = self.directory / "died"
        if step == 2:
            raise OSError(28, "No space left on device")
        if step == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (self.directory / f"step_{step}").touch()


def test_rollouts_are_written_by_a_new_writer_or_told_to_be_lost(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(rollout_log, "RolloutWriter", Writer)
    cfg = SimpleNamespace(logging=SimpleNamespace(rollouts=-1), cluster=ClusterConfig())
    log = rollout_log.RolloutLog(cfg, tmp_path, "")
    log.start()
    group = SimpleNamespace(
        prompt=SimpleNamespace(text=""), table=None, meta=SimpleNamespace(lengths=[1])
    )
    for step in range(1, 5):
        log.write(step, [group], [None], [[0.0]])
    log.flush()
    assert {p.name for p in tmp_path.iterdir()} == {"died", "step_1", "step_3", "step_4"}
    assert log.restarts == 1 and log.lost == [2]
    assert (
        "rollouts of step 2 are not written: OSError: [Errno 28] No space left"
        in capsys.readouterr().out
    )
    log.pool.stop()
