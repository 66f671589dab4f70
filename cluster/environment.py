"""Environment variables that every Volley process needs: one place, so that no actor differs from another.

Standard library only. A variable that the user has set wins.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

OPS_FOLDER = "torch_extensions"  # inside the virtual environment; filled by `make setup`


def ray_folder() -> Path:
    """Where Ray keeps its sessions, and word of the cluster that `ray start` began on this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def process_env(gpus: float = 0.0) -> dict[str, str]:
    """Variables for any process that imports torch, vLLM or DeepSpeed; `gpus` is what that process may use."""
    bin_dir = str(Path(sys.prefix) / "bin")
    path = os.environ.get("PATH", "")
    if bin_dir not in path.split(os.pathsep):
        path = f"{bin_dir}{os.pathsep}{path}"  # ninja, for DeepSpeed's operators
    defaults = {
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / OPS_FOLDER),
        "TOKENIZERS_PARALLELISM": "false",  # a threaded tokenizer must not be forked
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "DEEPSPEED_LOG_LEVEL": "warning",
    }
    if gpus == 0:
        defaults["DS_ACCELERATOR"] = "cpu"
    return {"PATH": path} | {name: os.environ.get(name, value) for name, value in defaults.items()}


def generator_env(kv_cache_gib: float, gpus: float = 0.0) -> dict[str, str]:
    """Variables for the process that owns a vLLM engine; `kv_cache_gib` is the size of its cache on a CPU, in GiB."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0"
    }  # the engine lives in the actor: one process, one deadline
    if gpus == 0:
        # vLLM takes whole GiB. Compiling the log-prob gather costs 6-12 s at the first step and gains nothing here.
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
            "TORCHDYNAMO_DISABLE": "1",
        }
    return process_env(gpus) | {
        name: os.environ.get(name, value) for name, value in defaults.items()
    }
