"""Runs programs that a model wrote in a sandbox: own namespaces and root, no network, and hard
limits.

A program is killed together with all of its children. docs/rewards.md describes what the sandbox
protects against and what it does not. Where a limit cannot be set, no program is run.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("child.py")


class SandboxUnavailable(RuntimeError):
    """This machine does not allow the sandbox to set a limit, so no program is run."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    `wall_s` and `cpu_s` are in seconds, `memory_mib` is the address space of each process,
    `processes` counts processes and threads, and `output_bytes` holds for stdout and stderr each.
    `total_s` is the wall time in seconds for all tests of one answer; it should be below
    reward.timeout_s.
    """

    wall_s: float = 4.0
    cpu_s: float = 4.0
    memory_mib: int = 512
    disk_mib: int = 16
    processes: int = 8
    output_bytes: int = 1 << 20
    total_s: float = 8.0


@dataclass(frozen=True)
class Run:
    """How one program ended.

    `kind` is one of: ok, wrong output, error, time limit, memory limit, output limit, process
    limit, file limit, network or file access refused, killed.
    """

    kind: str
    detail: str
    stdout: str = ""


def run_program(program: str, stdin: str = "", limits: Limits | None = None) -> Run:
    """Runs Python source with `stdin`. Raises SandboxUnavailable if it cannot be confined here."""
    limits = limits or Limits()
    status_read, status_write = os.pipe()
    job = {
        "program": program,
        "stdin": stdin,
        "limits": asdict(limits),
        "prefix": os.path.realpath(sys.base_prefix),
        "python": os.path.realpath(sys.executable),
    }
    child = subprocess.Popen(
        [os.path.realpath(sys.executable), "-I", "-S", "-B", str(CHILD), str(status_write)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[status_write],
        env={},
    )
    os.close(status_write)
    try:
        with child.stdin as pipe:
            pipe.write(json.dumps(job).encode("utf-8", "surrogatepass"))
        stdout, stderr, stopped = _collect(child, limits)
    finally:
        child.kill()  # process 1 inside dies with it, and with that every process of the program
        child.wait()
        with os.fdopen(status_read, "rb") as file:
            report = file.read()
    status = json.loads(report) if report else {}
    if "refused" in status:
        raise SandboxUnavailable(
            f"programs cannot be confined here, so none is run: {status['refused']}"
        )
    if stopped == "time limit" and any(sign in stderr for sign in _SIGNS[1][1]):
        stopped = "process limit"  # a fork bomb that goes on
    if stopped:
        most = {
            "time limit": f"{limits.wall_s:g} s",
            "output limit": f"{limits.output_bytes} bytes",
            "process limit": f"{limits.processes} processes",
        }[stopped]
        return Run(stopped, f"more than {most}", stdout)
    if not status:
        raise SandboxUnavailable(f"the sandbox ended without a report: {stderr[-300:]}")
    return _judge(status, stdout, stderr, limits)


def _collect(child: subprocess.Popen, limits: Limits) -> tuple[str, str, str]:
    """(stdout, stderr, limit): reads until both streams end or a limit is exceeded ("" if none)."""
    deadline, chunks = (
        time.monotonic() + limits.wall_s,
        {child.stdout: bytearray(), child.stderr: bytearray()},
    )
    stopped = ""
    with selectors.DefaultSelector() as selector:
        for stream in chunks:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not stopped:
            left = deadline - time.monotonic()
            ready = selector.select(max(0.0, left))
            if left <= 0:
                stopped = "time limit"
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                chunks[key.fileobj] += data
                if len(chunks[key.fileobj]) > limits.output_bytes:
                    stopped = "output limit"
    for stream in chunks:
        stream.close()
    out, err = (bytes(data).decode("utf-8", "replace") for data in chunks.values())
    return out, err, stopped


_SIGNS = (
    ("memory limit", ("MemoryError", "Cannot allocate memory", "std::bad_alloc")),
    ("process limit", ("can't start new thread", "Resource temporarily unavailable")),
    ("file limit", ("File too large", "No space left on device", "Too many open files")),
    (
        "network or file access refused",
        (
            "Operation not permitted",
            "Network is unreachable",
            "Read-only file system",
            "Permission denied",
        ),
    ),
)


def _judge(status: Mapping[str, Any], stdout: str, stderr: str, limits: Limits) -> Run:
    code, last = status["exit"], (stderr.strip().splitlines() or [""])[-1][:300]
    if code == 0:
        return Run("ok", "", stdout)
    if code in (-24, -9) and status["cpu_s"] >= limits.cpu_s - 0.5:
        return Run("time limit", f"more than {limits.cpu_s:g} s of CPU", stdout)
    for kind, signs in _SIGNS:
        if any(sign in last for sign in signs):
            return Run(kind, last, stdout)
    if code < 0:
        return Run("file limit" if code == -25 else "killed", f"signal {-code}; {last}", stdout)
    return Run("error", f"exit code {code}; {last}", stdout)


def run_tests(
    program: str, tests: Sequence[Mapping[str, Any]], limits: Limits | None = None
) -> list[Run]:
    """Runs `program` on each test, up to and including the first test that fails.

    A test {stdin, stdout} compares the whole output, except white space at the ends of lines and at
    the end of the text. A test {code} appends assertions to the program and runs both in one
    interpreter, which must reach the end of the code.
    """
    limits, runs = limits or Limits(), []
    end = time.monotonic() + limits.total_s
    for test in tests:
        left = end - time.monotonic()
        if left <= 0:
            return [*runs, Run("time limit", f"more than {limits.total_s:g} s for all tests")]
        now = Limits(**{**asdict(limits), "wall_s": min(limits.wall_s, left)})
        if "code" in test:
            token = secrets.token_hex(16)
            run = run_program(f"{program}\n{test['code']}\nprint({token!r}, flush=True)\n", "", now)
            good = run.stdout.rstrip().endswith(token)
            run = (
                Run("error", "ended before its tests did", run.stdout)
                if run.kind == "ok" and not good
                else run
            )
        else:
            run = run_program(program, str(test.get("stdin", "")), now)
            if run.kind == "ok" and _lines(run.stdout) != _lines(str(test["stdout"])):
                detail = f"printed {run.stdout[:80]!r}, expected {str(test['stdout'])[:80]!r}"
                run = Run("wrong output", detail, run.stdout)
        runs.append(run)
        if run.kind != "ok":
            break
    return runs


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
