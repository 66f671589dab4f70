"""Starts that are refused before an engine runs, and what a run keeps to itself: ports, tokens,
keys. Disks and object stores that fill up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.runs import QUIET, ROOT, RUN_S, Starter
from tests.processes import listening

pytestmark = pytest.mark.timeout(RUN_S + 60)
LINES = [
    "settings",
    "model",
    "memory",
    "cluster",
    "token",
    "folder",
    "object store",
    "weights",
    "data",
    "rewards",
]
SECRETS = {
    "WANDB_API_KEY": "sentinel-" + "a" * 40,
    "HF_TOKEN": "hf_sentinel" + "b" * 30,
    "OPENAI_API_KEY": "sk-sentinel" + "c" * 30,
    "RAY_AUTH_TOKEN": "5e" * 32,
}

WITH_VARIABLES = """import os, sys
os.environ.update({})
from learner import main
raise SystemExit(main.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("preflight"), "tiny")
    yield starter
    starter.close()


# ---- before anything starts ----------------------------------------------------------------------


def test_preflight_prints_a_table_and_leaves_nothing(start: Starter) -> None:
    run = start("table", "preflight=true")
    assert run.wait(60) == 0, run.output
    lines = run.output.splitlines()
    assert [line[:14].strip() for line in lines[:-1]] == LINES and lines[
        -1
    ] == "volley: ready to run"
    assert all(line[14:20].strip() in ("ok", "note") for line in lines[:-1])
    assert not run.folder.exists() and run.processes() == []


@pytest.mark.parametrize(
    "setting, words",
    [
        ("generator.kv_cache_gib=100000", "generator cache 100000.0 GiB"),
        ("cluster.address=127.0.0.1:1", "cluster.address=127.0.0.1:1: no answer"),
        ("run_dir=/proc/none", "run_dir=/proc/none: nothing can be written"),
    ],
)
def test_a_start_is_refused_as_preflight_would(start: Starter, setting: str, words: str) -> None:
    checked, run = start("checked", setting, "preflight=true"), start("refused", *QUIET, setting)
    assert checked.wait(60) == 1 and run.wait(60) == 1
    assert "FAIL" in checked.output
    for output in (checked.output, run.output):
        assert words in output and "Traceback" not in output
    assert "Ray cluster" not in run.output and not run.folder.exists()


def test_a_model_in_pickles_is_refused(start: Starter, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(ROOT / "actors" / "modeling" / "assets" / "tiny", folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    run = start("pickled", *QUIET, f"model={folder}")
    assert run.wait(60) == 1
    assert (
        f"model.path={folder}: has only pytorch_model.bin" in run.output
        and "Ray cluster" not in run.output
    )


# ---- ports, tokens, keys -------------------------------------------------------------------------


def files_with(folder: Path, secret: str) -> list[str]:
    return [str(p) for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


def test_a_run_keeps_to_itself(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys in the environment and one in the settings; two ranks, so that they meet over the
    network too. The guards' bounds are such that a warning comes.
    """
    session = Path(tempfile.mkdtemp(prefix="vr", dir="/tmp"))  # short: it holds sockets
    reward = start.folder / "mine.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=''):\n"
        "    return float(len(solution_str) % 5)\n"
    )
    kwargs = "{api_key:'key-in-settings'}"
    custom = f"+reward.options.custom={{mine:{{style:verl,path:'{reward}',kwargs:{kwargs}}}}}"
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    program = tmp_path / "main.py"
    program.write_text(
        WITH_VARIABLES.format(
            {"RAY_TMPDIR": str(session), "RAY_AUTH_TOKEN": SECRETS["RAY_AUTH_TOKEN"]}
        )
    )
    run = start(
        "secret",
        "steps=1",
        "learner.ranks=2",
        "cluster.dashboard=true",
        "logging.wandb=offline",
        custom,
        "+reward.rules.mine=0.1",
        "guards.clip_ratio=0",
        "rollout.max_tokens=24",
        "logging.report=true",
        program=(str(program),),
    )
    try:
        seen: dict[str, set[str]] = {}
        while run.process.poll() is None:
            for address, names in listening(run.processes()).items():
                seen.setdefault(address, set()).update(names)
            time.sleep(0.5)
        assert run.wait() == 0, run.output
        assert any("Learner" in name for name in seen["127.0.0.1"]), seen
        assert set(seen) <= {"127.0.0.1", "::1"}, seen
        logs = list(session.rglob("*.log"))
        assert logs, "where are Ray's logs?"
        for name, secret in [*SECRETS.items(), ("setting", "key-in-settings")]:
            assert secret not in run.output, name
            assert files_with(run.folder, secret) == [], name
            assert files_with(session, secret) == [], name
        assert "(hidden)" in (run.folder / "config.yaml").read_text()
        assert run.output.count("warning: ") == 1 and "are cut at rollout.max_tokens" in run.output
        assert run.metrics("guard/length_explosion") == {1: 1.0} and run.metrics(
            "guard/entropy_collapse"
        ) == {1: 0.0}
    finally:
        shutil.rmtree(session)


# ---- full disks, full stores ---------------------------------------------------------------------

# Runs the program with its checkpoints on a disk of its own, in a namespace where one may be
# mounted; after the first checkpoint something else fills that disk, but for `room` bytes.
SMALL_DISK = """
import json, os, subprocess, sys, time
from pathlib import Path

disk, room, *args = sys.argv[1:]
if os.environ.get("INSIDE") is None:
    command = ["unshare", "-rm", sys.executable, *sys.argv]
    raise SystemExit(subprocess.call(command, env={**os.environ, "INSIDE": "1"}))
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk], check=True)
run = subprocess.Popen([sys.executable, "-m", "learner.main", *args, f"checkpoint.folder={disk}"])
while run.poll() is None and not Path(disk, "step_00001", "manifest.json").exists():
    time.sleep(0.02)
free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
Path(disk, "filler").write_bytes(bytes(max(0, free - int(room))))
status = run.wait()

from learner.checkpoints.checkpoint import verify

verify(Path(disk, "step_00001"))
print("on the disk:", sorted(os.listdir(disk)))
raise SystemExit(status)
"""
CHECKPOINT = 12 * 969_920  # bytes of tensors


@pytest.mark.parametrize(
    "room, words",
    [
        pytest.param(
            CHECKPOINT - 8192,
            "about 11 MiB are needed, 11 MiB are free",
            marks=pytest.mark.slow,
            id="seen",
        ),
        pytest.param(CHECKPOINT + 4096, "No space left on device", id="met"),
    ],
)
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    start: Starter, tmp_path: Path, room: int, words: str
) -> None:
    """Seen before anything is written, or met in the middle of a file: the run goes on, the first
    checkpoint stays.
    """
    probe = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True
    )
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    program, disk = tmp_path / "small_disk.py", tmp_path / "disk"
    program.write_text(SMALL_DISK)
    disk.mkdir()
    run = start(
        f"full{room}", *QUIET, "checkpoint.every=1", program=(str(program), str(disk), str(room))
    )
    assert run.wait() == 0, run.output
    assert run.output.count("Older ones are intact") == 2 and run.output.count(words) == 2, (
        run.output
    )
    assert "checkpoint of step 2: " in run.output and "checkpoint of step 3: " in run.output
    assert "on the disk: ['filler', 'step_00001']" in run.output
    assert run.summary()["groups"]["trained"] == 12 and "Traceback" not in run.output


@pytest.fixture(scope="module")
def large(start: Starter) -> Path:
    """The embedded model made 40 times as large: a version (154 MB) is twice what the object store
    holds.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, tiny = start.folder / "large_model", ROOT / "actors" / "modeling" / "assets" / "tiny"
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "hidden_size": 640,
        "intermediate_size": 2560,
        "num_hidden_layers": 6,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "head_dim": 64,
    }
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("threshold, status", [("0.999", 0), ("0.0", 1)], ids=["spills", "no-room"])
@pytest.mark.slow
def test_a_full_object_store(
    start: Starter, large: Path, tmp_path: Path, threshold: str, status: int
) -> None:
    """Weights that do not fit go to the disk, and the run ends well; where Ray finds the disk full,
    one clear error.
    """
    program = tmp_path / "main.py"
    program.write_text(WITH_VARIABLES.format({"RAY_local_fs_capacity_threshold": threshold}))
    run = start(
        f"store{status}",
        *QUIET,
        f"model={large}",
        "steps=1",
        "cluster.object_store_mib=80",
        "rollout.prompts_per_step=2",
        "data.heldout_size=1",
        "algorithm.beta=0",
        "evaluation.samples=2",
        "checkpoint.every=0",
        program=(str(program),),
    )
    began = time.monotonic()
    assert run.wait() == status, run.output
    assert "two versions of the weights" in run.output
    if status:
        assert run.output.splitlines()[-2].startswith("volley: error: Ray's object store has "), (
            run.output
        )
        assert "150 MiB are needed. Raise cluster.object_store_mib" in run.output
        assert "Traceback" not in run.output and time.monotonic() - began < 150
    assert run.processes() == []
