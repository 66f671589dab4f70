"""`python -m learner.submit +experiment=r1_zero ...`: send a run to a cluster as a Ray job and follow its log.

What `ray job submit --working-dir . -- python -m learner.main ...` does, with everything checked that would otherwise
be told by a job that has failed: settings, address, token, Ray's version, room.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import placement, security
from cluster.jobs import head
from conf.schema import Config, ConfigError

ANSWER_S = 15.0  # for one request
AGENT_S = 20.0  # a cluster that has just been started has its agent some seconds later
AUTOSCALED_S = 30.0  # who waits for room longer than this expects an autoscaler to make some
LOOPBACK = ("http://127.0.0.1:", "http://localhost:", "http://[::1]:")


Loader = Callable[[list[str]], Config]  # the settings of these arguments; raises ConfigError


class SubmitError(RuntimeError):
    """Nothing was sent; the message says why and what to do."""


def find_address(given: str = "") -> str:
    """The job API's address: as given, of RAY_API_SERVER_ADDRESS, of an http RAY_ADDRESS, or of `make cluster`."""
    named = given or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
    if named.startswith("http"):
        return named.rstrip("/")
    if named:
        raise SubmitError(
            f"address={named}: expected that of the job API, such as http://HEAD:8265. Give --address, "
            "or set RAY_API_SERVER_ADDRESS."
        )
    if found := head.running():
        return found["dashboard"]
    raise SubmitError(
        "no cluster is named and none of `make cluster` is running here. Start one with `make cluster`, "
        "or give --address http://HEAD:8265."
    )


def ask(address: str, path: str) -> dict[str, Any]:
    """The JSON that the dashboard answers; the token is sent once it is asked for. Raises SubmitError."""
    import requests

    answer = None
    for mode in (os.environ.get("RAY_AUTH_MODE", ""), "token"):
        headers = (
            {"Authorization": f"Bearer {security.token()}"}
            if mode == "token" and security.token_source()
            else {}
        )
        try:
            answer = requests.get(address + path, headers=headers, timeout=ANSWER_S)
        except requests.RequestException as error:
            raise SubmitError(
                f"{address}: no answer: {error}. Is the head node up (`ray status` there), and its "
                "dashboard's port open to this machine?"
            ) from error
        if answer.status_code not in (401, 403):
            break
        os.environ["RAY_AUTH_MODE"] = "token"  # for what follows, Ray's own client included
    if answer.status_code in (401, 403):
        source = security.token_source()
        raise SubmitError(
            f"{address} asks for a token, and "
            + (
                f"refuses that of {source}. Put the cluster's there"
                if source
                else "none is there. Put the cluster's into "
                f"{security.token_file()}, or set RAY_AUTH_TOKEN"
            )
            + " (`ray get-auth-token` on its head node prints it)."
        )
    if answer.status_code != 200:
        raise SubmitError(
            f"{address}{path}: answered {answer.status_code}: {answer.text[:300]}. Is it a dashboard?"
        )
    return answer.json()


def check_version(theirs: str) -> None:
    import ray

    if theirs != ray.__version__:
        raise SubmitError(
            f"the cluster runs Ray {theirs}, this environment {ray.__version__}: they must be the same. "
            "Set up its nodes from the same requirements/*.lock, or use their environment here."
        )


def check_room(cfg: Config, nodes: list[dict[str, float]]) -> None:
    """Against all that the nodes have, free or not: what is in use may become free. Raises SubmitError."""
    wanted, have = placement.bundles(cfg), placement.total(nodes)
    need = placement.total([b.resources for b in wanted])
    if cfg.cluster.wait_s <= AUTOSCALED_S and any(
        have.get(name, 0.0) + 1e-9 < value for name, value in need.items()
    ):
        raise SubmitError(
            f"the run {placement.shortage(wanted, nodes, have, cfg.cluster.strategy)} Lower "
            "generator.count, learner.ranks or their cpus and gpus, add nodes, or raise cluster.wait_s "
            f"above {AUTOSCALED_S:g} where an autoscaler brings some."
        )


def environment(cfg: Config, address: str) -> dict[str, Any]:
    """The job's runtime environment: this code, time to end well, and where a relative run_dir is. A cluster elsewhere
    does not see this machine's disk."""
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(head.JOB_STOP_S)}
    if address.startswith(LOOPBACK):
        variables["VOLLEY_HOME"] = str(Path.cwd())
    elif not Path(cfg.run_dir).is_absolute():
        raise SubmitError(
            f"run_dir={cfg.run_dir}: expected an absolute folder on a disk that the cluster's nodes see."
        )
    return {"working_dir": str(head.ROOT), "env_vars": variables}


def submit(arguments: list[str], address: str, load: Loader) -> tuple[Any, str]:
    """Check everything, send the job, and return (client, id of the job). `load` checks the settings."""
    cfg = load(arguments)
    check_version(ask(address, "/api/version")["ray_version"])
    found = ask(address, "/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
    check_room(cfg, [node["resources_total"] for node in found if node["state"] == "ALIVE"])
    runtime_env = environment(cfg, address)
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.ERROR)  # it tells of every file that it leaves out
    client, deadline = JobSubmissionClient(address), time.monotonic() + AGENT_S
    while True:
        try:
            return client, client.submit_job(
                entrypoint=shlex.join(["python", "-m", "learner.main", *arguments]),
                runtime_env=runtime_env,
                metadata={"experiment": cfg.experiment},
            )
        except RuntimeError as error:
            if "agent" not in str(error).lower():
                raise SubmitError(f"{address} refused the job: {str(error)[:600]}") from error
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"{address} has no agent that could start the job, {AGENT_S:g} s long: {str(error)[:300]}. "
                    "See dashboard_agent.log in the logs folder of the head node's Ray session, free ports or memory "
                    "there, and start the head anew."
                ) from error
        time.sleep(1.0)


async def follow(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def main(argv: list[str], load: Loader) -> int:
    """Exit status: that of the job (0 done, 1 failed or stopped), 2 where nothing was sent."""
    parser = argparse.ArgumentParser(
        prog="learner.submit", description="Send a run to a cluster as a Ray job."
    )
    parser.add_argument("--address", default="", help="of the job API: http://HEAD:8265")
    parser.add_argument("--no-wait", action="store_true", help="do not follow the log")
    given, arguments = parser.parse_known_args(argv)
    try:
        address = find_address(given.address)
        client, job = submit(arguments, address, load)
    except (SubmitError, ConfigError) as error:
        print(f"volley: error: {error}", file=sys.stderr)
        return 2
    print(
        f"volley: {address} runs it as job {job}; `ray job stop {job}` ends it after its step, with a checkpoint",
        flush=True,
    )
    if given.no_wait:
        return 0
    try:
        asyncio.run(follow(client, job))
    except KeyboardInterrupt:
        print(f"\nvolley: the job goes on: `ray job logs --follow {job}`", file=sys.stderr)
        return 0
    status = client.get_job_status(job)
    print(f"volley: job {job}: {status.value}")
    return int(status.value != "SUCCEEDED")
