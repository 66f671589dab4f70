"""`python -m learner.submit` checks all it can before it sends a job to Ray's dashboard."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.jobs import head, submit
from learner.main import load

TOKEN = "0123456789abcdef"


class Dashboard(BaseHTTPRequestHandler):
    """A server that answers as Ray's dashboard does.

    `answers` maps a path to JSON. A request without `token` gets 401. `asked` lists the requests:
    (path, whether a token was sent).
    """

    answers: dict[str, Any] = {}
    token = ""
    asked: list[tuple[str, bool]] = []

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        path, given = self.path.partition("?")[0], self.headers.get("Authorization", "")
        self.asked.append((path, bool(given)))
        refused = self.token and given != f"Bearer {self.token}"
        body = json.dumps(self.answers.get(path, {})).encode()
        self.send_response(401 if refused else 200 if path in self.answers else 404)
        self.end_headers()
        self.wfile.write(b"Unauthorized" if refused else body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster, token or setting of whoever runs the tests."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))


@pytest.fixture
def dashboard() -> Iterator[type[Dashboard]]:
    kind = type(
        "Mine",
        (Dashboard,),
        {
            "asked": [],
            "answers": {
                "/api/version": {"ray_version": ray.__version__},
                "/api/v0/nodes": {
                    "data": {
                        "result": {
                            "result": [
                                {"state": "ALIVE", "resources_total": {"CPU": 4.0}},
                                {"state": "DEAD", "resources_total": {"CPU": 99.0}},
                            ]
                        }
                    }
                },
            },
        },
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    kind.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kind
    server.shutdown()


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert submit.main([*argv], load) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("volley: error: ") and err.count("\n") == 1
    return err


def test_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert "make cluster" in refusal(capsys, "experiment=r1_zero")


def test_an_address_that_is_not_the_job_api(capsys: pytest.CaptureFixture[str]) -> None:
    assert "http://HEAD:8265" in refusal(capsys, "--address", "10.0.0.1:6379", "experiment=r1_zero")


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"http://127.0.0.1:{head.free_port(1)}"
    assert "no answer" in refusal(capsys, "--address", address, "experiment=r1_zero")


def test_a_wrong_setting_is_told_before_anything_is_asked(
    dashboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "generator.cont" in refusal(capsys, "--address", dashboard.address, "+generator.cont=2")
    assert dashboard.asked == []


def test_token_missing_and_wrong(
    dashboard: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dashboard.token = TOKEN
    said = refusal(capsys, "--address", dashboard.address, "experiment=r1_zero")
    assert "none is there" in said and str(tmp_path / "token") in said and TOKEN not in said
    (tmp_path / "token").write_text("another")
    said = refusal(capsys, "--address", dashboard.address, "experiment=r1_zero")
    assert f"refuses that of {tmp_path / 'token'}" in said and "another" not in said


def test_the_token_goes_only_to_who_asks_for_it(dashboard: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert submit.ask(dashboard.address, "/api/version") == {"ray_version": ray.__version__}
    assert dashboard.asked == [("/api/version", False)] and "RAY_AUTH_MODE" not in os.environ
    dashboard.token = TOKEN
    submit.ask(dashboard.address, "/api/version")
    assert dashboard.asked[1:] == [("/api/version", False), ("/api/version", True)]
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_another_version_of_ray(dashboard: Any, capsys: pytest.CaptureFixture[str]) -> None:
    dashboard.answers["/api/version"] = {"ray_version": "2.10.0"}
    said = refusal(capsys, "--address", dashboard.address, "experiment=r1_zero")
    assert "2.10.0" in said and ray.__version__ in said


def test_no_room(dashboard: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(
        capsys, "--address", dashboard.address, "experiment=r1_zero", "generator.count=40"
    )
    assert (
        "40 x generator (CPU 1)" in said
        and "nodes that have CPU 4:" in said
        and "Lower generator.count" in said
    )


def test_an_autoscaler_may_make_room() -> None:
    cfg = load(["experiment=r1_zero", "generator.count=40", "cluster.wait_s=600"])
    submit.check_room(cfg, [{"CPU": 4.0}])


def test_where_a_relative_run_dir_is() -> None:
    cfg = load(["experiment=r1_zero"])
    variables = submit.environment(cfg, "http://127.0.0.1:8265")["env_vars"]
    assert (
        variables["VOLLEY_HOME"] == str(Path.cwd())
        and int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 11
    )
    with pytest.raises(submit.SubmitError, match="absolute folder"):
        submit.environment(cfg, "http://10.0.0.1:8265")


def test_a_head_that_is_gone_is_not_running(tmp_path: Path) -> None:
    assert head.running() is None
    head.record().parent.mkdir()
    head.record().write_text(
        json.dumps({"pid": os.getpid(), "created": 1.0, "dashboard": "http://127.0.0.1:1"})
    )
    assert head.running() is None  # the number belongs to another process by now


def test_a_head_that_ends_while_it_is_stopped_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    head.record().parent.mkdir(exist_ok=True)
    head.record().write_text("{}")
    monkeypatch.setattr(head, "running", lambda: {"pid": gone.pid, "address": "127.0.0.1:1"})
    assert head.stop() == 0 and not head.record().exists()
