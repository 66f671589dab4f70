"""A run as a Ray job on the cluster of `make cluster`: sent, watched, stopped, and gone on with.

One run is watched while it trains and then stopped; a second one, sent by Ray's own command line,
ends it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cluster.monitoring.metrics import METRICS, describe
from cluster.monitoring.sinks import prometheus_name
from tests.cluster import browser
from tests.cluster.live import ROOT, TINY, Place, steps, until
from tests.processes import listening

PYTHON = sys.executable
ACTORS = {"learner-0", "generator-0", "reference-0", "rewards", "rollout-writer"}
SERIES = re.compile(r"^ray_(volley_\w+)\{")

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


class Cluster:
    """Of `make cluster`, with a run on it that goes on until it is stopped."""

    def __init__(self) -> None:
        self.place = Place(RAY_metrics_report_interval_ms="2000")
        started = self.place.run(PYTHON, "-m", "cluster.jobs.head", "start", "4")
        assert started.returncode == 0, started.stdout
        about = json.loads((self.place.folder / "ray" / "volley_head.json").read_text())
        self.address, self.gcs = about["dashboard"], about["address"]
        self.place.env["RAY_API_SERVER_ADDRESS"] = self.address
        self.run_dir = self.place.folder / "run"
        self.job = ""

    def ask(self, path: str) -> Any:
        answer = requests.get(
            self.address + path, headers={"Authorization": f"Bearer {self.place.token}"}, timeout=30
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def log(self) -> str:
        return self.ask(f"/api/jobs/{self.job}/logs")["logs"]

    def status(self) -> str:
        return self.ask(f"/api/jobs/{self.job}")["status"]

    def actors(self) -> list[dict[str, Any]]:
        found = self.ask("/api/v0/actors?detail=1&limit=10000")["data"]["result"]["result"]
        return [
            a for a in found if a["state"] == "ALIVE" and a["ray_namespace"] == self.run_dir.name
        ]

    def series(self) -> dict[str, str]:
        """Volley's metrics as every endpoint for Prometheus shows them now: name -> its help."""
        found = {}
        targets = json.loads(
            (self.place.folder / "ray" / "prom_metrics_service_discovery.json").read_text()
        )
        for target in targets[0]["targets"]:
            try:
                text = requests.get(
                    f"http://{target}/metrics",
                    timeout=30,
                    headers={"Authorization": f"Bearer {self.place.token}"},
                ).text
            except (
                requests.ConnectionError
            ):  # those of the dashboard and the autoscaler, which have nothing of ours
                continue
            helps = dict(re.findall(r"^# HELP ray_(\w+) (.*)$", text, re.MULTILINE))
            found |= {
                name.group(1): helps[name.group(1)]
                for line in text.splitlines()
                if (name := SERIES.match(line))
            }
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        sent = made.place.run(
            PYTHON,
            "-m",
            "learner.submit",
            "--no-wait",
            *TINY,
            "steps=100000",
            "checkpoint.every=0",
            "logging.wandb=disabled",
            f"run_dir={made.run_dir}",
        )
        assert sent.returncode == 0, sent.stdout
        made.job = re.search(r"as job (\w+)", sent.stdout).group(1)
        until(
            lambda: steps(made.run_dir) or made.status() not in ("PENDING", "RUNNING"),
            "first step",
            made.log,
        )
        assert steps(made.run_dir), made.log()
        yield made
        stopped = made.place.run(PYTHON, "-m", "cluster.jobs.head", "stop")
        assert stopped.returncode == 0, stopped.stdout
        assert made.place.processes() == []
    finally:
        made.place.close()


def test_the_job_joined_this_cluster(cluster: Cluster) -> None:
    assert f"joined the Ray cluster at {cluster.gcs}" in cluster.log(), cluster.log()
    assert re.search(
        r"^step 1/100000  reward ", cluster.log(), re.MULTILINE
    )  # readable without a terminal


def test_who_has_no_token_is_refused(cluster: Cluster) -> None:
    for path in ("/api/jobs/", "/api/v0/actors", "/api/version"):
        assert requests.get(cluster.address + path, timeout=30).status_code == 401, path
    sent = requests.post(f"{cluster.address}/api/jobs/", json={"entrypoint": "true"}, timeout=30)
    assert sent.status_code == 401
    assert [j["submission_id"] for j in cluster.ask("/api/jobs/")] == [cluster.job]


def test_every_port_is_on_the_loopback(cluster: Cluster) -> None:
    found = listening(cluster.place.processes())
    assert set(found) == {"127.0.0.1"} and {"gcs_server", "raylet"} <= found["127.0.0.1"], found


def test_actors_have_names_that_read_well(cluster: Cluster) -> None:
    assert {a["name"] for a in cluster.actors()} == ACTORS
    shown = {a["name"]: a["repr_name"] for a in cluster.actors()}
    assert [
        shown[name] for name in ("generator-0", "learner-0", "reference-0", "rollout-writer")
    ] == ["generator-0", "learner-0", "reference-0", "rollout-writer"], shown
    placed = {a["name"]: bool(a["placement_group_id"]) for a in cluster.actors()}
    assert {name for name, reserved in placed.items() if reserved} == ACTORS - {"rollout-writer"}


def test_live_metrics_of_the_run(cluster: Cluster) -> None:
    """What metrics.jsonl has is at the endpoint, explained and with its unit."""
    names = {n for n in steps(cluster.run_dir)[0] if "/" in n}
    assert {
        "timing_s/step",
        "training/rollout_logprob_diff/mean",
        "generator/serving",
        "generator/restarts",
        "reward/error_share",
    } <= names
    wanted = {prometheus_name(n) for n in (*names, "step", "time")}
    until(
        lambda: wanted <= set(cluster.series()),
        "series",
        lambda: sorted(wanted - set(cluster.series())),
        40,
    )
    found = cluster.series()
    for name in names:
        about = describe(name)
        assert (
            about.help in found[prometheus_name(name)]
            and about.unit in found[prometheus_name(name)]
        )


ALL = """
import ray, sys
from cluster.monitoring.metrics import METRICS
from cluster.monitoring.sinks import MetricLog
from cluster.monitoring.stat import Stat
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
log = MetricLog(sys.argv[2], ray_metrics=True)
log.log(1, {name.replace("{", "").replace("}", ""): 0.5 if m.reduce == "last" else Stat.of([0.5])
            for name, m in METRICS.items() if name not in ("step", "time")})
print("logged", flush=True)
sys.stdin.readline()
"""


def test_every_documented_metric_can_be_scraped(cluster: Cluster) -> None:
    documented = re.findall(
        r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    wanted = set()
    for name in documented:
        base, *how = name.replace("{", "").replace("}", "").split(", /")
        wanted |= {prometheus_name(base)} | {
            prometheus_name(f"{base.rpartition('/')[0]}/{h}") for h in how
        }
    assert len(documented) == len(METRICS) and len(wanted) > len(METRICS)
    program = cluster.place.start(
        "all",
        PYTHON,
        "-c",
        ALL,
        cluster.gcs,
        str(cluster.place.folder / "all"),
        RAY_AUTH_MODE="token",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        PYTHONPATH=str(ROOT),
    )
    try:
        until(lambda: "logged" in program.output, "word", lambda: program.output, 60)
        until(
            lambda: wanted <= set(cluster.series()),
            "series",
            lambda: sorted(wanted - set(cluster.series())),
            40,
        )
    finally:
        program.say("")
        program.wait(30)


def test_the_dashboard_in_a_browser(cluster: Cluster, tmp_path: Path) -> None:
    """VOLLEY_SCREENSHOT=FILE keeps the picture: docs/dashboard.png is one."""
    if not browser.installed():
        pytest.skip(
            f"no browser: none of {', '.join(browser.NAMES)} is installed "
            "(apt-get install chromium)"
        )
    page = browser.Page(tmp_path, {"Authorization": f"Bearer {cluster.place.token}"})
    try:
        page.open(f"{cluster.address}/#/jobs")
        until(lambda: cluster.job in page.text() and "RUNNING" in page.text(), "job", page.text, 60)
        page.open(f"{cluster.address}/#/actors")
        until(lambda: all(name in page.text() for name in ACTORS), "actors", page.text, 60)
        time.sleep(1)
        picture = page.picture()
        assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
        if kept := os.environ.get("VOLLEY_SCREENSHOT"):
            Path(kept).write_bytes(picture)
    finally:
        page.close()


def test_more_than_the_cluster_has_ends_in_an_error_and_nothing_else(cluster: Cluster) -> None:
    """By `cluster=auto`, outside a job: it finds this cluster and starts no second one."""
    before, began = {a["name"] for a in cluster.actors()}, time.monotonic()
    ended = cluster.place.run(
        PYTHON,
        "-m",
        "learner.main",
        *TINY,
        "generator.count=30",
        "logging.wandb=disabled",
        f"run_dir={cluster.place.folder / 'large' / 'run'}",
    )  # the same namespace
    assert ended.returncode == 1 and time.monotonic() - began < 30, ended.stdout
    assert f"joined the Ray cluster at {cluster.gcs}" in ended.stdout
    assert "30 x generator (CPU 1)" in ended.stdout and "short of CPU 31" in ended.stdout, (
        ended.stdout
    )
    assert "nodes that have CPU 4:" in ended.stdout and "Traceback" not in ended.stdout
    assert {a["name"] for a in cluster.actors()} == before
    groups = cluster.ask("/api/v0/placement_groups?detail=1&limit=1000")["data"]["result"]["result"]
    assert [g["state"] for g in groups].count("CREATED") == 1 and "PENDING" not in [
        g["state"] for g in groups
    ]


def test_stopped_it_leaves_a_checkpoint_and_goes_on(cluster: Cluster) -> None:
    stopped = cluster.place.run("ray", "job", "stop", cluster.job, RAY_AUTH_MODE="token")
    assert stopped.returncode == 0, stopped.stdout
    until(lambda: cluster.status() != "RUNNING", "end", cluster.log, 30)
    assert cluster.status() == "STOPPED" and "Traceback" not in cluster.log(), cluster.log()
    done = steps(cluster.run_dir)[-1]["step"]
    assert [p.name for p in (cluster.run_dir / "checkpoints").iterdir()] == [f"step_{done:05d}"], (
        cluster.log()
    )
    until(lambda: not cluster.actors(), "end of the actors", lambda: str(cluster.actors()), 30)

    sent = cluster.place.run(
        "ray",
        "job",
        "submit",
        "--working-dir",
        ".",
        "--",
        "python",
        "-m",
        "learner.main",
        *TINY,
        f"steps={done + 2}",
        "checkpoint.every=0",
        "logging.wandb=disabled",
        "resume=auto",
        f"run_dir={cluster.run_dir}",
        RAY_AUTH_MODE="token",
    )
    assert sent.returncode == 0 and "succeeded" in sent.stdout, sent.stdout
    uploaded = re.search(r"Uploading package .*|size.*MiB", sent.stdout)
    print(uploaded.group() if uploaded else "uploaded before")
    assert f"going on after step {done}" in sent.stdout
    assert [row["step"] for row in steps(cluster.run_dir)] == [*range(1, done + 3)]
    assert json.loads((cluster.run_dir / "summary.json").read_text())["steps"] == done + 2
