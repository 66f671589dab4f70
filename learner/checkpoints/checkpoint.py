"""A checkpoint is a transaction: written to a temporary folder, checksummed, fsynced and renamed.

    RUN_DIR/checkpoints/step_00012/
        policy.safetensors  critic.safetensors  trainer.json  manifest.json

Only after that may an older checkpoint be removed. A checkpoint without a manifest, or whose files
do not match it, is refused by name, and the one before it is used (DESIGN invariant 7). Tensors
are whole (not sharded) float32 safetensors, so a run may resume with another number of ranks or
another ZeRO stage, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from conf.schema import CheckpointConfig, Config
from learner.checkpoints.retention import doomed

FOLDER, MANIFEST, STATE = "checkpoints", "manifest.json", "trainer.json"
# Folder of the run in which a downloaded checkpoint lies until it is loaded.
FETCHED = "checkpoints.fetched"
NAME = re.compile(r"step_\d+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used. The message names it, the fault, and what to do."""


class Store:
    """The checkpoints of one run, in a local folder or at any address of fsspec (s3://BUCKET/RUN).

    On a local disk a rename commits a checkpoint. Object stores have no atomic rename: there a
    checkpoint is written to `staging` (a local folder) and uploaded file by file, and the manifest,
    which is uploaded last, commits it. Raises CheckpointError for an address that fsspec cannot
    open.
    """

    def __init__(self, address: str, staging: Path) -> None:
        self.address, self.staging = address.rstrip("/"), staging
        try:
            self.fs, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint.folder={address}: {error}. Expected a folder, or an address that "
                "fsspec can open with the packages that are installed."
            ) from error
        self.root = root.rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)
        if self.local:
            self.staging = Path(self.root)

    def probe(self) -> None:
        """Raise CheckpointError where the address cannot be written, before the run starts."""
        path = f"{self.root}/.volley"
        try:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(path, b"")
            self.fs.rm_file(path)
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            raise CheckpointError(
                f"checkpoint.folder={self.address}: cannot be written: {type(error).__name__}: "
                f"{error}. Give another, or mend its rights or credentials."
            ) from error

    # ---- writing ---------------------------------------------------------------------------------

    def write(
        self,
        step: int,
        state: Mapping[str, Any],
        save_tensors: Callable[[Path], None],
        c: CheckpointConfig,
    ) -> None:
        """Commit the checkpoint of `step`, then remove those that `doomed` names.

        `save_tensors(folder)` writes *.safetensors. `state` can be written as JSON; its "metrics"
        (name -> value at this step) decide which checkpoints are best. A failure such as a full
        disk leaves older checkpoints unchanged and no half-written one. Raises OSError.
        """
        self.sweep()
        partial = self.staging / f"step_{step:05d}.partial"
        partial.mkdir(parents=True)
        try:
            save_tensors(partial)
            (partial / STATE).write_text(json.dumps(state, indent=1))
            files = sorted(partial.iterdir())
            manifest = {p.name: {"bytes": p.stat().st_size, "xxh3_128": digest(p)} for p in files}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*files, partial / MANIFEST, partial):
                fsync(path)
            self.commit(partial, [*(p.name for p in files), MANIFEST])
        finally:
            # By now it is renamed (and this does nothing), uploaded, or useless.
            shutil.rmtree(partial, ignore_errors=True)
        self.prune(step, c)

    def prune(self, written: int, c: CheckpointConfig) -> None:
        """Remove what need not stay once the checkpoint of step `written` is committed.

        Raises OSError."""
        committed = self.steps()
        values = {
            step: self.value(step, c.metric) if c.keep_best else None
            for step, whole in committed.items()
            if whole
        }
        incomplete = [step for step, whole in committed.items() if not whole]
        try:
            for step in (*incomplete, *doomed(values, written, c.keep, c.keep_best, c.mode)):
                self.remove(step)
        except OSError as error:
            raise OSError(
                f"that of step {written} is there, but an older one cannot be removed: {error}"
            ) from error

    def commit(self, partial: Path, names: list[str]) -> None:
        """Make a folder of `staging` the checkpoint of its name; `names`: its files, manifest last.

        Raises OSError."""
        target = f"{self.root}/{partial.stem}"
        if self.fs.exists(target):
            self.remove(step_of(partial.stem))
        if self.local:
            partial.rename(target)
            fsync(Path(self.root))
            return
        try:
            self.fs.makedirs(target, exist_ok=True)
            for name in names:
                self.fs.put_file(str(partial / name), f"{target}/{name}")
        except OSError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise OSError(f"{self.shown(partial.stem)}: {type(error).__name__}: {error}") from error

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first, so that a removal cut short leaves none."""
        folder = f"{self.root}/step_{step:05d}"
        if self.fs.exists(f"{folder}/{MANIFEST}"):
            self.fs.rm_file(f"{folder}/{MANIFEST}")
        self.fs.rm(folder, recursive=True)

    def sweep(self) -> None:
        """Remove what a killed driver left half-written."""
        for stale in self.staging.glob("step_*.partial"):
            shutil.rmtree(stale)

    # ---- reading ---------------------------------------------------------------------------------

    def shown(self, name: str = "") -> str:
        """The address of a checkpoint, or of the store, for messages."""
        return f"{self.address}/{name}".rstrip("/")

    def steps(self) -> dict[int, bool]:
        """Step -> whether its checkpoint is committed, oldest first; always read from the store."""
        self.fs.invalidate_cache()
        try:
            names = [p.rstrip("/").rpartition("/")[2] for p in self.fs.ls(self.root, detail=False)]
        except FileNotFoundError:
            return {}
        return {
            step_of(n): self.fs.exists(f"{self.root}/{n}/{MANIFEST}")
            for n in sorted(filter(NAME.fullmatch, names), key=step_of)
        }

    def value(self, step: int, metric: str) -> float | None:
        """Value of a metric at that step; None where the checkpoint does not hold it."""
        try:
            state = json.loads(self.fs.cat_file(f"{self.root}/step_{step:05d}/{STATE}"))
        except (OSError, ValueError):  # a damaged checkpoint is never among the best
            return None
        return state.get("metrics", {}).get(metric)

    def fetch(self, name: str) -> Path:
        """A verified local folder with the checkpoint `name`.

        Raises CheckpointError naming what is wrong with it."""
        if self.local:
            folder = Path(self.root) / name
        else:
            folder = self.staging / FETCHED / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                for path in self.fs.ls(f"{self.root}/{name}", detail=False):
                    self.fs.get_file(path, str(folder / path.rpartition("/")[2]))
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {self.shown(name)}: cannot be read: {error}"
                ) from error
        verify(folder, self.shown(name))
        return folder

    def newest(self, refused: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that verifies, as a local folder; None where there is none.

        `refused` is called with a sentence for each newer checkpoint that does not verify."""
        for step in reversed([*self.steps()]):
            try:
                return self.fetch(f"step_{step:05d}")
            except CheckpointError as error:
                refused(f"{error}; trying the one before it")
        return None


def open_store(cfg: Config, run_dir: Path) -> Store:
    """The store of this run: checkpoint.folder, or a folder in the run's own."""
    return Store(cfg.checkpoint.folder or str(run_dir / FOLDER), run_dir)


def step_of(name: str) -> int:
    """The step in a checkpoint's name, such as step_00012."""
    return int(name.removeprefix("step_"))


def digest(path: Path) -> str:
    """xxh3-128 of a file, as hex."""
    h = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            h.update(block)
    return h.hexdigest()


def fsync(path: Path) -> None:
    """Make a file or folder durable: it survives a power loss after this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify(folder: Path, address: str = "") -> None:
    """Raise CheckpointError naming the first file that is missing, cut short or altered.

    `address`: where the checkpoint came from, for the message; by default the folder."""
    label = f"checkpoint {address or folder}"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        expected = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{label}: no readable {MANIFEST}: {error}") from error
    if STATE not in expected:
        raise CheckpointError(f"{label}: {MANIFEST} does not name {STATE}")
    for name, (size, checksum) in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{label}: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{label}: {name} has {path.stat().st_size} bytes, expected {size}"
            )
        if digest(path) != checksum:
            raise CheckpointError(f"{label}: {name} does not match its checksum")
