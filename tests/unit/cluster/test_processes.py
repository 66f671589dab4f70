"""What ends a test's processes: one that has ended by itself is no error."""

from __future__ import annotations

import subprocess
import time

import psutil

from tests import processes


def test_a_process_that_has_ended_is_passed_over() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(child.pid)
    deadline = time.monotonic() + 30
    while not processes.title(process) and time.monotonic() < deadline:
        time.sleep(0.01)  # within exec the kernel shows no arguments yet
    assert processes.title(process) == "sleep 60"
    processes.kill([process])
    assert child.wait() == -9
    processes.kill([process])
    assert processes.title(process) == ""
