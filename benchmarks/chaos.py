"""Kill processes of a training run at random and see that it ends as the quiet run does: `make
chaos`.

    python -m benchmarks.chaos [--kills 100] [--seed 0]

Prints kills by kind, restarts by role, exit status, conservation, whether weights and rollouts are
those of the quiet run, and wall times. Exit status 0 if all is as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.flow.runs import QUIET, Run, Starter
from tests.processes import title

# Classes of the actors. The workers of the reward service are children of its actor.
CLASSES = {
    "generator": "Generator",
    "reference": "Reference",
    "rewards": "RewardService",
    "learner": "LearnerRank",
    "rollout_writer": "RolloutWriter",
}
KINDS = (*CLASSES, "reward_worker")
PAUSE_S = (
    0.5  # longest time from a step's end to the kill: about a step, so that every phase is hit
)
WAIT_S = 60.0
# A constant rate, so that the first steps of a run do not depend on how many follow.
ARGS = [*QUIET, "optimizer.decay=constant", "checkpoint.every=1", "logging.rollouts=-1"]
PATIENT = [
    "generator.restarts=1000",
    "learner.restarts=1000",
    "cluster.restarts=1000",
    "cluster.restart_backoff_s=0",
]


def victims(run: Run, kind: str) -> list[psutil.Process]:
    """Living processes of this kind."""
    if kind == "reward_worker":
        children = []
        for service in victims(run, "rewards"):
            with suppress(psutil.NoSuchProcess):
                children += service.children(recursive=True)
        return [p for p in children if leads_a_session(p.pid)]
    # Ray's title of the process; while the constructor runs the actor's name stands before the
    # class.
    shape = re.compile(rf"ray::(\S+:)?{CLASSES[kind]}\b")
    return sorted((p for p in run.processes() if shape.match(title(p))), key=lambda p: p.pid)


def leads_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def strike(
    run: Run, kind: str, rng: random.Random, how: signal.Signals = signal.SIGKILL
) -> psutil.Process:
    """Send a signal to one process of this kind, as soon as there is one."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if found := victims(run, kind):
            chosen = rng.choice(found)
            with suppress(psutil.NoSuchProcess):
                chosen.send_signal(how)
                return chosen
        time.sleep(0.05)
    raise AssertionError(f"no {kind} process within {WAIT_S:g} s:\n{run.output}")


def last_step(run: Run) -> int:
    return max(run.metrics("reward/mean"), default=0)


def torment(run: Run, kinds: list[str], rng: random.Random) -> None:
    """One kill of each listed kind in turn, at a random moment of the step after one that was done
    since the last.
    """
    for kind in kinds:
        before = last_step(run)
        # `until` calls the condition at once, so the loop's variable is the right one.
        run.until(lambda: last_step(run) > before, f"step after {before}")  # noqa: B023
        time.sleep(rng.uniform(0.0, PAUSE_S))
        strike(run, kind, rng)


def replaced(run: Run) -> Counter[str]:
    """How often each actor was started again, by its name in the run's output."""
    return Counter(re.findall(r"^volley: (\S+) is lost \(", run.output, re.MULTILINE))


def differences(quiet: Run, run: Run) -> list[str]:
    """What is not bit for bit as in the quiet run, and books that do not balance."""
    found = []
    books = run.summary()["groups"]
    if books["admitted"] != sum(n for state, n in books.items() if state != "admitted"):
        found.append(f"groups are not conserved: {books}")
    for key in ("groups", "tokens_generated", "before", "after"):
        if quiet.summary()[key] != run.summary()[key]:
            found.append(f"{key}: {run.summary()[key]}, quiet {quiet.summary()[key]}")
    ours, theirs = run.rollouts(), quiet.rollouts()
    if len(ours) != len(theirs):
        found.append(f"{len(ours)} files of rollouts, quiet {len(theirs)}")
    found += [
        f"rollouts of step {i}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False), 1)
        if not a.equals(b)
    ]
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "training/policy_version"):
        if quiet.metrics(name) != run.metrics(name):
            found.append(f"metric {name}")
    if quiet.weights() != run.weights():
        found.append("weights")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kinds = [rng.choice(KINDS) for _ in range(options.kills)]
    steps = [f"steps={options.kills + 5}"]
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        start = Starter(Path(folder), "tiny")
        try:
            result, problems = compare(start, kinds, rng, steps)
        finally:
            start.close()
    for name, value in result.items():
        print(f"{name}: {value}")
    print("\n".join(problems) or "everything as in the quiet run, bit for bit")
    return 1 if problems else 0


def compare(
    start: Starter, kinds: list[str], rng: random.Random, steps: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Both runs; (what happened, what is wrong)."""
    runs, walls = {}, {}
    for name in ("quiet", "chaos"):
        began = time.monotonic()
        runs[name] = run = start(name, *ARGS, *PATIENT, *steps)
        if name == "chaos":
            torment(run, kinds, rng)
        code = run.wait(3600)
        walls[name] = time.monotonic() - began
        if code:
            return {"run": name, "exit status": code}, [run.output]
    left = run.titles()
    problems = [*differences(runs["quiet"], run), *(f"left behind: {p}" for p in left)]
    return {
        "kills": dict(Counter(kinds)),
        "replaced": dict(replaced(run)),
        "exit status": code,
        "groups": run.summary()["groups"],
        "wall": ", ".join(f"{name} {s:.0f} s" for name, s in walls.items()),
    }, problems


if __name__ == "__main__":
    sys.exit(main())
