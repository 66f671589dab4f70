"""Programs of a model are confined: every attack ends, gains nothing and is reported by kind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reward_service.rules import tasks
from reward_service.rules.item import RewardItem
from reward_service.rules.scorer import Scorer, score_safely
from reward_service.sandbox import programs
from reward_service.sandbox.programs import Limits, Run, SandboxUnavailable, run_program, run_tests

QUICK = Limits(wall_s=1.5, memory_mib=256)  # for programs that never end
PATIENT = Limits(
    wall_s=20.0, cpu_s=10.0, memory_mib=256
)  # for those that do, on a busy machine too


def available() -> str:
    try:
        run_program("pass")
    except SandboxUnavailable as error:
        return str(error)
    return ""


REFUSED = available()
confined = pytest.mark.skipif(bool(REFUSED), reason=f"the sandbox refuses to run here: {REFUSED}")


def left_over() -> list[str]:
    """Command lines of processes that still run a sandboxed program, two seconds after its end."""
    end = time.monotonic() + 2.0
    while (found := _running()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _running() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            found += [line] if "/box/main.py" in line else []
    return found


@confined
def test_an_honest_program_gets_its_input_and_is_heard() -> None:
    run = run_program("import math, sys\nprint(math.comb(5, 2), sys.stdin.read())", "in")
    assert run == Run("ok", "", "10 in\n")


@confined
@pytest.mark.parametrize(
    "program, kind",
    [
        ("import os\nwhile True: os.fork()", "process limit"),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "time limit"),
        ("x = bytearray(10**10)", "memory limit"),
        ("x = []\nwhile True: x.append(' ' * 10**6 + str(len(x)))", "memory limit"),
        ("while True: pass", "time limit"),
        ("import time; time.sleep(60)", "time limit"),
        ("while True: print('x' * 1000)", "output limit"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output limit"),
        (
            "import socket; socket.create_connection(('127.0.0.1', 80))",
            "network or file access refused",
        ),
        ("import socket; socket.socket(socket.AF_UNIX)", "network or file access refused"),
        ("open('/usr/lib/x', 'w')", "network or file access refused"),
        ("open('/x', 'w')", "network or file access refused"),
        ("f = open('x', 'wb')\nwhile True: f.write(b'x' * 10**6)", "file limit"),
        (
            "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
            "  except (OSError, ValueError): pass\nwhile True: pass",
            "time limit",
        ),
        ("import os; os.kill(os.getpid(), 11)", "killed"),
        ("import sys; sys.exit(3)", "error"),
        ("print(", "error"),
    ],
)
def test_attack_is_reported_as_what_it_was(program: str, kind: str) -> None:
    limits, start = QUICK if kind in ("time limit", "process limit") else PATIENT, time.monotonic()
    assert run_program(program, "", limits).kind == kind
    assert time.monotonic() - start < limits.wall_s + 3.0
    assert left_over() == []


@confined
def test_a_daemon_does_not_outlive_its_program() -> None:
    program = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    time.sleep(60)\n"
        "  os._exit(0)\nprint('done')"
    )
    start = time.monotonic()
    assert run_program(program, "", PATIENT).stdout == "done\n"
    assert time.monotonic() - start < 10.0  # its open output does not hold us up either
    assert left_over() == []


@confined
def test_nothing_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    monkeypatch.setenv("API_KEY", "hunter2")
    program = f"""
import os, glob
print(os.environ.get("API_KEY"), os.path.exists({str(secret)!r}), os.path.exists("/etc/passwd"))
print(os.getuid(), os.getppid())
print([open(p, "rb").read() for p in glob.glob("/proc/*/environ")], os.listdir("/box"))
for number in range(3, 64):
    try: print("open descriptor", os.fstat(number))
    except OSError: pass
"""
    assert run_program(program).stdout == "None False False\n65534 1\n[] ['main.py']\n"


@confined
def test_no_way_back_to_privileges_or_to_the_supervisor() -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.unshare(0x40000000), end=" ")
print(libc.mount(b"x", b"/box", b"tmpfs", 0, None))
print(libc.ptrace(16, 1, 0, 0), libc.chroot(b"/box"), libc.setuid(0))
try: os.kill(1, 9)
except OSError: pass
print("still here")
"""
    assert run_program(program).stdout == "-1 -1 -1\n-1 -1 -1\nstill here\n"


@confined
def test_a_listening_host_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        run_program(f"import socket; socket.create_connection(('127.0.0.1', {port})).send(b'x')")
        with pytest.raises(TimeoutError):
            server.accept()


@confined
def test_output_is_compared_whole_and_not_by_prefix() -> None:
    tests = [{"stdin": "2", "stdout": "4\n"}, {"stdin": "3", "stdout": "9"}]
    assert [run.kind for run in run_tests("print(int(input())**2)", tests)] == ["ok", "ok"]
    assert [run.kind for run in run_tests("print(4)", tests)] == ["ok", "wrong output"]
    assert run_tests("print(4); print(5)", tests)[0].kind == "wrong output"
    assert (
        run_tests("print(4, end=' \\n\\n')", tests)[0].kind == "ok"
    )  # white space at the ends only
    assert run_tests("print('4 ', 4)", tests)[0].kind == "wrong output"


@confined
def test_assertions_must_be_reached_and_hold() -> None:
    test = [{"code": "assert double(2) == 4"}]
    assert run_tests("def double(x): return 2 * x", test)[0].kind == "ok"
    assert "AssertionError" in run_tests("def double(x): return x", test)[0].detail
    assert run_tests("import os; os._exit(0)", test)[0].detail == "ended before its tests did"


def code_item(answer: str, gold: str = '[{"stdin": "2", "stdout": "4"}]') -> RewardItem:
    return RewardItem("1", f"<think>w</think><answer>{answer}</answer>", gold, task="code")


@confined
def test_code_reward_of_a_fenced_program_and_of_a_bare_one() -> None:
    assert (
        tasks.grade(code_item("Here:\n```python\nprint(int(input())**2)\n```\n"), {}).accuracy
        == 1.0
    )
    assert tasks.grade(code_item("print(int(input())**2)"), {}).accuracy == 1.0
    slow = tasks.grade(code_item("while True: pass"), {"limits": {"wall_s": 0.5}})
    assert (slow.accuracy, slow.status) == (0.0, "ok") and "time limit" in slow.reason


def test_code_without_tests_is_ungradable() -> None:
    for gold in ("[]", "nonsense", '[{"stdin": "2"}]'):
        assert tasks.grade(code_item("print(4)", gold), {}).status == "ungradable"


def test_nothing_runs_where_a_limit_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "child.py"
    source = (
        Path(programs.CHILD)
        .read_text()
        .replace("check(LIBC.prctl(22, 2, program, 0, 0)", "check(-1")
    )
    broken.write_text(source)
    monkeypatch.setattr(programs, "CHILD", broken)
    with pytest.raises(SandboxUnavailable, match="none is run"):
        run_program("print(1)")
    result = score_safely(Scorer({"rules": {"accuracy": 1.0}}), code_item("print(4)"))
    assert (
        result.status == "error" and "SandboxUnavailable" in result.reason
    )  # a status, not a zero


@confined
@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="drops from root to another user; without root every test here does it",
)
def test_it_confines_without_privileges_too() -> None:
    """The same for an ordinary user, with the Python of the system: that of the environment may be
    readable by root only."""
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no system Python")
    script = Path(programs.CHILD).read_text()
    job = {
        "program": "import os\ntry: os.listdir('/root')\n"
        "except OSError as e: print(type(e).__name__, os.getuid())\n"
        "import socket\nsocket.socket()",
        "stdin": "",
        "prefix": "/usr",
        "python": str(python.resolve()),
        "limits": {"wall_s": 4, "cpu_s": 4, "memory_mib": 256, "disk_mib": 16, "processes": 8},
    }
    command = (
        "import os, sys; os.setgroups([]); os.setgid(4321); os.setuid(4321)\n"
        "os.execv(sys.argv[1], [*sys.argv[1:2], '-I', '-S', '-c', *sys.argv[2:]])"
    )
    read, write = os.pipe()
    run = subprocess.run(
        [str(python), "-c", command, str(python), script, str(write)],
        pass_fds=[write],
        input=json.dumps(job).encode(),
        capture_output=True,
        timeout=30,
    )
    os.close(write)
    status = json.loads(os.read(read, 1000))
    os.close(read)
    assert "refused" not in status, status
    assert run.stdout == b"FileNotFoundError 65534\n"
    assert b"Operation not permitted" in run.stderr and status["exit"] == 1
    assert sys.platform == "linux"
