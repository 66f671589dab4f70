"""Several raylets on one machine: a run is spread over them, loses one in the middle of a step,
takes in another.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.live import TINY, Place, steps, until
from tests.processes import title

STEPS = 100_000  # it is stopped
LOST = "generator-1: no node has room for it"
BACK = "generator-1 is healthy again"

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


class Nodes:
    """`head` for driver, learner and small services; `one` and `two` for a generator each."""

    def __init__(self) -> None:
        # Ray gives a silent node 40 s by default; here it is known to be dead after 4.
        self.place = Place(
            RAY_AUTH_MODE="token",
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            RAY_health_check_period_ms="1000",
            RAY_health_check_timeout_ms="1000",
            RAY_health_check_failure_threshold="3",
            RAY_health_check_initial_delay_ms="0",
        )
        self.raylets = self.place.start("raylets", sys.executable, "-m", "tests.cluster.live")
        self.ids: dict[str, str] = {}
        self.add("head", 4, '{"learners":1}')
        self.address = re.search(r"^address (\S+)", self.raylets.output, re.MULTILINE).group(1)
        for name in ("one", "two"):
            self.add(name, 1, '{"generators":1}')

    def add(self, name: str, cpus: int, resources: str) -> None:
        self.raylets.say(f"add {name} {cpus} {resources}")
        found = until(
            lambda: re.search(rf"^node {name} (\w+)", self.raylets.output, re.MULTILINE),
            f"node {name}",
            lambda: self.raylets.output,
            60,
        )
        self.ids[name] = found.group(1)

    def kill(self, name: str) -> None:
        self.raylets.say(f"kill {name}")
        until(
            lambda: f"killed {name}" in self.raylets.output,
            "death",
            lambda: self.raylets.output,
            30,
        )

    def generators_on(self, name: str) -> int:
        """Generators among the processes that the raylet of this node started."""
        raylet = next(
            p
            for p in self.place.processes()
            if title(p).split(" ")[0].endswith("/raylet") and self.ids[name] in title(p)
        )
        return sum("ray::generator" in title(p).lower() for p in raylet.children(recursive=True))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = None
    try:
        made = Nodes()
        yield made
    finally:
        if made:
            made.raylets.process.kill()
            made.place.close()


def test_a_generator_node_is_lost_and_another_taken_in(nodes: Nodes) -> None:
    folder = nodes.place.folder / "run"
    run = nodes.place.start(
        "run",
        sys.executable,
        "-m",
        "learner.main",
        *TINY,
        "generator.count=2",
        f"cluster={nodes.address}",
        "+cluster.resources.learner={learners: 1}",
        "+cluster.resources.generator={generators: 1}",
        f"steps={STEPS}",
        "checkpoint.every=0",
        "logging.wandb=disabled",
        f"run_dir={folder}",
    )

    def serving() -> list[float]:
        return [row["generator/serving"] for row in steps(folder)]

    def alive() -> str:
        assert run.process.poll() is None, run.output
        return run.output

    # 1. spread: each role where its resource is
    until(lambda: alive() and len(serving()) >= 2, "second step", lambda: run.output)
    places = dict(re.findall(r"\((\w{6})\): ([\w, -]+)", run.output))
    assert places[nodes.ids["head"][:6]].startswith("learner-0"), run.output
    assert {places[nodes.ids[n][:6]] for n in ("one", "two")} == {"generator-0", "generator-1"}
    victim = next(n for n in ("one", "two") if places[nodes.ids[n][:6]] == "generator-1")

    # 2. lost in the middle of a step: the others go on
    nodes.kill(victim)
    until(lambda: LOST in alive(), "word of it", lambda: run.output, 60)
    until(lambda: serving()[-2:] == [1, 1], "two steps without it", lambda: run.output, 60)

    # 3. another node: used from the next step on
    nodes.add("three", 1, '{"generators":1}')
    until(lambda: BACK in alive(), "it back", lambda: run.output, 90)
    assert nodes.generators_on("three") == 1
    until(lambda: serving()[-2:] == [2, 2], "two steps with it", lambda: run.output, 60)

    # 4. nothing was lost: every group admitted is trained
    run.process.terminate()
    assert run.wait(30) == 130 and "Traceback" not in run.output, run.output
    rows = steps(folder)
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    assert [row["groups/trained"] + row["groups/filtered"] for row in rows] == [
        4 * row["step"] for row in rows
    ]
    assert rows[-1]["groups/admitted"] == 4 * len(rows) and rows[-1]["generator/restarts"] >= 1
    assert set(serving()) == {1.0, 2.0}
