"""Sends a run to a cluster as a Ray job and follows its log.

`python -m learner.submit +experiment=r1_zero ...` does what `ray job submit --working-dir . --
python -m learner.main ...` does. Before that it checks the settings, the address, the token, Ray's
version and the room on the cluster, so that a mistake is reported at once and not by a job that has
failed.
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

ANSWER_S = 15.0  # deadline of one request
AGENT_S = 20.0  # the agent of a new cluster starts some seconds after the rest
# A run that waits longer than this for room (cluster.wait_s) relies on an autoscaler.
AUTOSCALED_S = 30.0
LOOPBACK = ("http://127.0.0.1:", "http://localhost:", "http://[::1]:")

# Returns the settings of these arguments of the command line, or raises ConfigError.
Loader = Callable[[list[str]], Config]


class SubmitError(RuntimeError):
    """Nothing was sent. The message says why and what to do."""


def find_address(given: str = "") -> str:
    """Return the address of the cluster's job API, such as "http://HEAD:8265".

    It is the `given` one, else that of RAY_API_SERVER_ADDRESS, RAY_ADDRESS or `make cluster`.
    Raises SubmitError if there is none.
    """
    named = given or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
    if named.startswith("http"):
        return named.rstrip("/")
    if named:
        raise SubmitError(
            f"address={named}: expected that of the job API, such as http://HEAD:8265. Give "
            "--address, or set RAY_API_SERVER_ADDRESS."
        )
    if note := head.running():
        return note["dashboard"]
    raise SubmitError(
        "no cluster is named and none of `make cluster` is running here. Start one with "
        "`make cluster`, or give --address http://HEAD:8265."
    )


def ask(address: str, path: str) -> dict[str, Any]:
    """Return the JSON with which the dashboard answers a GET request.

    Ray's token is sent only if the dashboard asks for it. Raises SubmitError.
    """
    response = _get(address, path, os.environ.get("RAY_AUTH_MODE", "") == "token")
    if response.status_code in (401, 403):
        os.environ["RAY_AUTH_MODE"] = "token"  # for later requests and for Ray's own client
        response = _get(address, path, True)
    if response.status_code in (401, 403):
        source = security.token_source()
        if source:
            cause = f"refuses that of {source}. Put the cluster's there"
        else:
            cause = (
                f"none is there. Put the cluster's into {security.token_file()}, or set "
                "RAY_AUTH_TOKEN"
            )
        raise SubmitError(
            f"{address} asks for a token, and {cause} (`ray get-auth-token` on its head node "
            "prints it)."
        )
    if response.status_code != 200:
        raise SubmitError(
            f"{address}{path}: answered {response.status_code}: {response.text[:300]}. Is it a "
            "dashboard?"
        )
    return response.json()


def _get(address: str, path: str, with_token: bool) -> Any:
    """Return the response to a GET request. Raises SubmitError if there is none."""
    import requests

    headers = {}
    if with_token and security.token_source():
        headers = {"Authorization": f"Bearer {security.token()}"}
    try:
        return requests.get(address + path, headers=headers, timeout=ANSWER_S)
    except requests.RequestException as error:
        raise SubmitError(
            f"{address}: no answer: {error}. Is the head node up (`ray status` there), and its "
            "dashboard's port open to this machine?"
        ) from error


def check_version(theirs: str) -> None:
    """Raise SubmitError if the cluster runs another version of Ray than this environment."""
    import ray

    if theirs != ray.__version__:
        raise SubmitError(
            f"the cluster runs Ray {theirs}, this environment {ray.__version__}: they must be the "
            "same. Set up its nodes from the same requirements/*.lock, or use their environment "
            "here."
        )


def check_room(cfg: Config, nodes: list[dict[str, float]]) -> None:
    """Raise SubmitError if the nodes could not hold the run even if nothing else used them.

    nodes: all resources of each node, in use or not, because what is in use may become free.
    """
    needed, available = placement.bundles(cfg), placement.total(nodes)
    need = placement.total([b.resources for b in needed])
    if cfg.cluster.wait_s <= AUTOSCALED_S and placement.lacking(need, available):
        raise SubmitError(
            f"the run {placement.shortage(needed, nodes, available, cfg.cluster.strategy)} Lower "
            "generator.count, learner.ranks or their cpus and gpus, add nodes, or raise "
            f"cluster.wait_s above {AUTOSCALED_S:g} where an autoscaler brings some."
        )


def environment(cfg: Config, address: str) -> dict[str, Any]:
    """Return the job's runtime environment: this code, and variables of its environment.

    Raises SubmitError for a relative run_dir on another machine, which does not see this machine's
    disk.
    """
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(head.JOB_STOP_S)}
    if address.startswith(LOOPBACK):
        variables["VOLLEY_HOME"] = str(Path.cwd())  # where a relative run_dir lies
    elif not Path(cfg.run_dir).is_absolute():
        raise SubmitError(
            f"run_dir={cfg.run_dir}: expected an absolute folder on a disk that the cluster's "
            "nodes see."
        )
    return {"working_dir": str(head.ROOT), "env_vars": variables}


def submit(arguments: list[str], address: str, load: Loader) -> tuple[Any, str]:
    """Check everything and send the job. Returns Ray's client and the id of the job.

    Raises SubmitError or ConfigError if nothing was sent.
    """
    cfg = load(arguments)
    check_version(ask(address, "/api/version")["ray_version"])
    nodes = ask(address, "/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
    check_room(cfg, [node["resources_total"] for node in nodes if node["state"] == "ALIVE"])
    runtime_env = environment(cfg, address)
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.ERROR)  # it reports each file that it leaves out
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
                    f"{address} has no agent that could start the job, {AGENT_S:g} s long: "
                    f"{str(error)[:300]}. See dashboard_agent.log in the logs folder of the head "
                    "node's Ray session, free ports or memory there, and start the head anew."
                ) from error
        time.sleep(1.0)


async def follow(client: Any, job: str) -> None:
    """Print the job's log until the job ends."""
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def main(argv: list[str], load: Loader) -> int:
    """Send the run of these arguments and follow it.

    Returns the exit status: that of the job (0 done, 1 failed or stopped), or 2 if nothing was
    sent.
    """
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
        f"volley: {address} runs it as job {job}; `ray job stop {job}` ends it after its step, "
        "with a checkpoint",
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
