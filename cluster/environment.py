"""The environment variables of every process of a run, in one place so that all actors agree.

Standard library only. A variable that the user has set is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

OPS_FOLDER = "torch_extensions"  # compiled operators, in the virtual environment; see `make setup`


def ray_folder() -> Path:
    """Return the folder where Ray keeps its sessions, and the address of a cluster that `ray start`
    started on this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def process_env(gpus: float = 0.0) -> dict[str, str]:
    """Return the variables for a process that imports torch, vLLM or DeepSpeed.

    gpus: what the process may use.
    """
    bin_folder = str(Path(sys.prefix) / "bin")
    path = os.environ.get("PATH", "")
    if bin_folder not in path.split(os.pathsep):
        path = f"{bin_folder}{os.pathsep}{path}"  # DeepSpeed compiles operators with its ninja
    defaults = {
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / OPS_FOLDER),
        "TOKENIZERS_PARALLELISM": "false",  # a process whose tokenizer has threads must not fork
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "DEEPSPEED_LOG_LEVEL": "warning",
    }
    if gpus == 0:
        defaults["DS_ACCELERATOR"] = "cpu"
    return {"PATH": path, **_unless_set(defaults)}


def generator_env(kv_cache_gib: float, gpus: float = 0.0) -> dict[str, str]:
    """Return the variables for a process that has a vLLM engine.

    kv_cache_gib: size of the engine's cache in GiB, for an engine on a CPU.
    """
    # The engine runs in the actor's own process, so one deadline covers both.
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if gpus == 0:
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib)))  # whole GiB
        # Compiling the gather of log-probs takes 6 to 12 s in the first step and gains nothing.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    return process_env(gpus) | _unless_set(defaults)


def _unless_set(defaults: dict[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
