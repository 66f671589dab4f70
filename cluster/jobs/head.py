"""A Ray cluster on this machine that outlives a run: `make cluster` and `make cluster-stop`.

All its ports are on the loopback and ask for Ray's token. `ray stop` would end every Ray on the
machine, also runs with a local cluster of their own; `stop` ends only the cluster that `start`
started.
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
START_S = 90.0  # deadline of the start
STOP_S = 20.0  # from SIGTERM to SIGKILL of what is to end
GCS_PORT, DASHBOARD_PORT, AGENT_PORT = 6379, 8265, 52365  # Ray's usual ports
# From SIGTERM to SIGKILL of a job that `ray job stop` ends. It is longer than a run takes to end
# (STOP_S of cluster/stopping.py).
JOB_STOP_S = 15
OBJECT_STORE_MIB = 512
LOG_LINES = 12  # last lines of Ray's output in an error message


def record() -> Path:
    """Return the file in which `start` notes the cluster that it started."""
    return ray_folder() / "volley_head.json"


def running() -> dict[str, Any] | None:
    """Return the note of `start` if its cluster is running, else None.

    The note is {"pid", "created", "dashboard", "address"}. The time of creation tells the process
    from a later one with the same number.
    """
    try:
        note = json.loads(record().read_text())
        alive = psutil.Process(note["pid"]).create_time() == note["created"]
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    return note if alive else None


def command(cpus: int) -> list[str]:
    """Return the command `ray start` of the head node.

    cpus: logical CPUs, which actors reserve. They need not be as many as the machine's cores.
    """
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
    """Return the port `usual` if nothing on the loopback listens there, else any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", usual))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def agent_answers(options: dict[str, str]) -> bool:
    """Return whether the dashboard's agent, which starts jobs, listens.

    options: of `ray start`.
    """
    address = ("127.0.0.1", int(options["dashboard-agent-listen-port"]))
    with suppress(OSError):
        socket.create_connection(address, 1.0).close()
        return True
    return False


def start(cpus: int) -> int:
    """Start the cluster and print how to use it. Returns the exit status."""
    if note := running():
        print(
            f"volley: the cluster is up already: dashboard at {note['dashboard']}. End it with "
            "`make cluster-stop`."
        )
        return 0
    security.secure_local_cluster()
    # A job resolves a relative run_dir in VOLLEY_HOME (learner/run.py).
    os.environ.update(process_env(), VOLLEY_HOME=str(ROOT))
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
    note = {
        "pid": process.pid,
        "created": psutil.Process(process.pid).create_time(),
        "address": f"127.0.0.1:{options['port']}",
        "dashboard": f"http://127.0.0.1:{options['dashboard-port']}",
    }
    write_json(record(), note)
    if not wait_until_up(process, log, options):
        stop()
        last_lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(
            f"volley: error: Ray did not start within {START_S:g} s. Its last words, from {log}:\n"
            + "\n".join(last_lines),
            file=sys.stderr,
        )
        return 1
    print_usage(cpus, note["dashboard"])
    return 0


def wait_until_up(process: subprocess.Popen, log: Path, options: dict[str, str]) -> bool:
    """Wait until Ray runs and can start jobs. Returns False if it ends or takes over START_S.

    log: Ray's output. options: of `ray start`.
    """
    deadline = time.monotonic() + START_S
    # The dashboard's agent comes up some seconds after the rest.
    while not ("Ray runtime started" in log.read_text(errors="replace") and agent_answers(options)):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def print_usage(cpus: int, dashboard: str) -> None:
    print(f"""volley: a Ray cluster is up, with {cpus} logical CPUs and a dashboard at {dashboard}
Whoever uses it needs the token ({security.token_source()}); the dashboard asks for it once.
  . {Path(sys.prefix) / "bin" / "activate"}
  export RAY_AUTH_MODE=token RAY_API_SERVER_ADDRESS={dashboard}
  ray job submit --working-dir . -- python -m learner.main +experiment=r1_zero
  python -m learner.submit +experiment=r1_zero     # the same, checked before it is sent
`make cluster-stop` ends it, and every job on it.""")


def stop() -> int:
    """End the cluster that `start` started, with all its processes. Returns the exit status."""
    note = running()
    if note is None:
        print("volley: no cluster of `make cluster` is running")
        return 0
    processes = []
    with suppress(psutil.NoSuchProcess):  # the cluster may end by itself in this moment
        head = psutil.Process(note["pid"])
        processes = [head, *head.children(recursive=True)]
        head.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    # Ray's own note of the address goes too, or the next run would try to join this cluster.
    address = ray_folder() / "ray_current_cluster"
    if address.is_file() and address.read_text().strip() == note["address"]:
        address.unlink()
    record().unlink(missing_ok=True)
    print("volley: the cluster is stopped")
    return 0


def main(argv: list[str]) -> int:
    """Run `start [CPUS]` or `stop`. Returns the exit status, which is 2 for other arguments."""
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
