"""What the tests of clusters share: an environment of their own, programs in it, and several
raylets on one machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import processes

ROOT = Path(__file__).resolve().parents[2]
MARK = "VOLLEY_TEST_CLUSTER"
WAIT_S = 150.0
TINY = [
    "+experiment=r1_zero",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=48",
    "data.template=short",
    "data.max_prompt_tokens=40",
    "data.heldout_size=2",
    "evaluation.samples=4",
    "generator.threads=1",
    "learner.threads=1",
    "logging.progress=plain",
    "logging.report=false",
    "optimizer.decay=constant",
]


class Place:
    """A folder for Ray and for runs, a token and environment variables, apart from whatever else
    runs here.
    """

    def __init__(self, **variables: str) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="v", dir="/tmp")
        )  # short: Ray's sockets lie in it
        self.token = uuid.uuid4().hex * 2
        (self.folder / "token").write_text(self.token)
        self.mark = uuid.uuid4().hex
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VOLLEY_"))
        } | {
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            MARK: self.mark,
            "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
            **variables,
        }

    def run(
        self, *command: str, seconds: float = WAIT_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self.env | variables,
            text=True,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start(self, name: str, *command: str, **variables: str) -> Program:
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.env | variables,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Program(process, log)

    def processes(self) -> list[psutil.Process]:
        return processes.marked(MARK, self.mark)

    def close(self) -> None:
        processes.kill(self.processes())
        shutil.rmtree(self.folder, ignore_errors=True)


class Program:
    def __init__(self, process: subprocess.Popen, log: Path) -> None:
        self.process, self.log = process, log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = WAIT_S) -> int:
        return self.process.wait(timeout=seconds)

    def say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()


def until(
    condition: Callable[[], Any],
    what: str,
    shown: Callable[[], Any] = lambda: "",
    seconds: float = WAIT_S,
) -> Any:
    """What the condition returns once it is true; fails with what `shown` returns where that takes
    too long.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s:\n{shown()}"
        time.sleep(0.1)
    return found


def steps(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl that belong to training steps."""
    file = folder / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )
    return [row for row in rows if "reward/mean" in row]


def raylets() -> None:
    """A head on the loopback, then by lines on stdin: `add NAME CPUS JSON` and `kill NAME`. Says
    each node's id.
    """
    from ray.cluster_utils import Cluster

    nodes: dict[str, Any] = {}
    cluster = None
    for line in sys.stdin:
        verb, name, *rest = line.split(maxsplit=3)
        if verb == "kill":
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print(f"killed {name}", flush=True)
            continue
        arguments = {
            "num_cpus": int(rest[0]),
            "resources": json.loads(rest[1]),
            "object_store_memory": 100 << 20,
        }
        if cluster is None:
            cluster = Cluster(
                initialize_head=True, head_node_args=arguments | {"include_dashboard": False}
            )
            nodes[name] = cluster.head_node
            print(f"address {cluster.address}", flush=True)
        else:
            nodes[name] = cluster.add_node(**arguments)
        print(f"node {name} {nodes[name].node_id}", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    raylets()
