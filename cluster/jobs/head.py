"""A Ray cluster on this machine that outlives a run: `make cluster` and `make cluster-stop`.

Everything listens on the loopback and asks for Ray's token. `ray stop` would end every Ray on the machine, runs with a
local cluster of their own included; `stop` ends this one alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from cluster import security
from cluster.environment import process_env, ray_folder
from cluster.files import write_json

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 90.0, 20.0
GCS_PORT, DASHBOARD_PORT, AGENT_PORT = (
    6379,
    8265,
    52365,
)  # Ray's usual ones; where one is taken, another
JOB_STOP_S = (
    15  # from SIGTERM to SIGKILL of `ray job stop`: longer than a run takes to end (learner/run.py)
)
OBJECT_STORE_MIB = 512


def record() -> Path:
    """Where `start` leaves word of what it started."""
    return ray_folder() / "volley_head.json"


def running() -> dict[str, Any] | None:
    """What `start` left word of, where its process is alive: {"pid", "created", "dashboard", "address"}."""
    try:
        found = json.loads(record().read_text())
        alive = psutil.Process(found["pid"]).create_time() == found["created"]
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    return found if alive else None


def command(cpus: int) -> list[str]:
    """`ray start` of the head node; `cpus` are logical: shares that actors reserve, not cores."""
    return [
        str(Path(sys.prefix) / "bin" / "ray"),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        f"--port={free_port(GCS_PORT)}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={free_port(DASHBOARD_PORT)}",
        "--include-dashboard=true",
        f"--dashboard-agent-listen-port={free_port(AGENT_PORT)}",
        f"--num-cpus={cpus}",
        f"--object-store-memory={OBJECT_STORE_MIB << 20}",
    ]


def free_port(usual: int) -> int:
    """`usual` where nothing on the loopback listens there, else any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", usual))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(options: dict[str, str]) -> bool:
    """Whether the agent listens. `options`: of `ray start`."""
    with suppress(OSError):
        socket.create_connection(
            ("127.0.0.1", int(options["dashboard-agent-listen-port"])), 1.0
        ).close()
        return True
    return False


def start(cpus: int) -> int:
    """Start the cluster and say how to use it. Exit status."""
    if found := running():
        print(
            f"volley: the cluster is up already: dashboard at {found['dashboard']}. End it with `make cluster-stop`."
        )
        return 0
    security.secure_local_cluster()
    os.environ.update(
        process_env(), VOLLEY_HOME=str(ROOT)
    )  # where a job's relative run_dir is (learner/run.py)
    os.environ.setdefault("RAY_JOB_STOP_WAIT_TIME_S", str(JOB_STOP_S))
    ray_folder().mkdir(parents=True, exist_ok=True)
    log = record().with_suffix(".log")
    arguments = command(cpus)
    options = dict(a.removeprefix("--").partition("=")[::2] for a in arguments[2:])
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ray_folder(),
        )
    about = {
        "pid": process.pid,
        "created": psutil.Process(process.pid).create_time(),
        "address": f"127.0.0.1:{options['port']}",
        "dashboard": f"http://127.0.0.1:{options['dashboard-port']}",
    }
    write_json(record(), about)
    deadline = time.monotonic() + START_S
    # The agent, which starts jobs, comes up some seconds after the rest.
    while not ("Ray runtime started" in log.read_text(errors="replace") and answers(options)):
        if process.poll() is not None or time.monotonic() > deadline:
            stop()
            print(
                f"volley: error: Ray did not start within {START_S:g} s. Its last words, from {log}:\n"
                + "\n".join(log.read_text(errors="replace").splitlines()[-12:]),
                file=sys.stderr,
            )
            return 1
        time.sleep(0.2)
    print(f"""volley: a Ray cluster is up, with {cpus} logical CPUs and a dashboard at {about["dashboard"]}
Whoever uses it needs the token ({security.token_source()}); the dashboard asks for it once.
  . {Path(sys.prefix) / "bin" / "activate"}
  export RAY_AUTH_MODE=token RAY_API_SERVER_ADDRESS={about["dashboard"]}
  ray job submit --working-dir . -- python -m learner.main +experiment=r1_zero
  python -m learner.submit +experiment=r1_zero     # the same, checked before it is sent
`make cluster-stop` ends it, and every job on it.""")
    return 0


def stop() -> int:
    """End what `start` started: the head, its raylet and every worker. Exit status."""
    found = running()
    if found is None:
        print("volley: no cluster of `make cluster` is running")
        return 0
    family = []
    with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
        head = psutil.Process(found["pid"])
        family = [head, *head.children(recursive=True)]
        head.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    address = ray_folder() / "ray_current_cluster"
    if address.is_file() and address.read_text().strip() == found["address"]:
        address.unlink()  # or the next run would look for it there
    record().unlink(missing_ok=True)
    print("volley: the cluster is stopped")
    return 0


def main(argv: list[str]) -> int:
    if argv[:1] == ["stop"]:
        return stop()
    if argv[:1] != ["start"] or len(argv) > 2 or not all(a.isdigit() and int(a) for a in argv[1:]):
        print(
            f"volley: error: {' '.join(argv)}: expected `start`, `start CPUS` or `stop`",
            file=sys.stderr,
        )
        return 2
    return start(int(argv[1]) if argv[1:] else max(os.cpu_count() or 1, 4))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
