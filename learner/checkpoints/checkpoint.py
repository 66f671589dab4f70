"""Checkpoints as transactions: written beside, checksummed, fsynced, renamed; only then may an older one go.

    RUN_DIR/checkpoints/step_00012/   policy.safetensors  critic.safetensors  trainer.json  manifest.json

A checkpoint without a manifest, or whose files do not match it, is refused by name and the one before it is used
(DESIGN invariant 7). Tensors are whole (not sharded) float32 safetensors, so a run may resume with other ranks or
another ZeRO stage, and nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from cluster.monitoring import metrics
from cluster.security import redact
from conf.schema import CheckpointConfig, Config, ConfigError
from conf.settings import keys
from learner.evaluation.measures import MAJ_K, PASS_KS

ROOT = Path(__file__).resolve().parents[2]

FOLDER, MANIFEST, STATE = "checkpoints", "manifest.json", "trainer.json"
FETCHED = "checkpoints.fetched"  # in the run's folder: a checkpoint that came from elsewhere, until it is loaded
# Settings that change where and how fast a run goes, not what it computes.
HARMLESS = (
    "steps",
    "run_dir",
    "resume",
    "allow_changes",
    "preflight",
    "algorithm.source",
    "algorithm.rewards",
    "algorithm.coefficient",
    "generator.",
    "learner.ranks",
    "learner.zero_stage",
    "learner.micro_batch_tokens",
    "learner.logprob_chunk_tokens",
    "learner.timeout_s",
    "learner.threads",
    "learner.cpus",
    "learner.gpus",
    "learner.gradient_checkpointing",
    "learner.restarts",
    "reference.",
    "evaluation.",
    "cluster.",
    "logging.",
    "checkpoint.",
    "guards.",
    "reward.workers",
    "reward.timeout_s",
    "rollout.timeout_s",
)


NAME = re.compile(r"step_\d+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names it, what is wrong with it and what to do."""


class Store:
    """The checkpoints of one run, at an address: a local folder, or whatever fsspec knows (s3://BUCKET/RUN, ...).

    On a local disk a rename commits. Elsewhere there is none that is atomic: a checkpoint is made in `staging` (a local
    folder), uploaded file by file, and the manifest, which comes last, commits. Raises CheckpointError for an address
    that fsspec cannot open.
    """

    def __init__(self, address: str, staging: Path) -> None:
        self.address, self.staging = address.rstrip("/"), staging
        try:
            self.fs, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint.folder={address}: {error}. Expected a folder, or an address that fsspec "
                "can open with the packages that are installed."
            ) from error
        self.root = root.rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)
        if self.local:
            self.staging = Path(self.root)

    def probe(self) -> None:
        """Raise CheckpointError where nothing can be written: better now than at the first checkpoint."""
        there = f"{self.root}/.volley"
        try:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(there, b"")
            self.fs.rm_file(there)
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            raise CheckpointError(
                f"checkpoint.folder={self.address}: cannot be written: {type(error).__name__}: "
                f"{error}. Give another, or mend its rights or credentials."
            ) from error

    # ---- writing ----------------------------------------------------------------------------------------------

    def write(
        self,
        step: int,
        state: Mapping[str, Any],
        save_tensors: Callable[[Path], None],
        c: CheckpointConfig,
    ) -> None:
        """Commit the checkpoint of `step`, then remove those that `doomed` names. `save_tensors(folder)` writes
        *.safetensors; `state` is JSON-able, its "metrics" (name -> value of this very step) decide which are best.

        A failure (a full disk) leaves older checkpoints as they are and no half-written one behind; raises OSError.
        """
        self.sweep()
        beside = self.staging / f"step_{step:05d}.partial"
        beside.mkdir(parents=True)
        try:
            save_tensors(beside)
            (beside / STATE).write_text(json.dumps(state, indent=1))
            files = sorted(beside.iterdir())
            manifest = {p.name: {"bytes": p.stat().st_size, "xxh3_128": digest(p)} for p in files}
            (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*files, beside / MANIFEST, beside):
                fsync(path)
            self.commit(beside, [*(p.name for p in files), MANIFEST])
        finally:
            shutil.rmtree(beside, ignore_errors=True)  # renamed by now, uploaded, or of no use
        self.prune(step, c)

    def prune(self, written: int, c: CheckpointConfig) -> None:
        """Remove what need not stay now that the checkpoint of step `written` is there. Raises OSError."""
        there = self.steps()
        values = {
            s: self.value(s, c.metric) if c.keep_best else None
            for s, whole in there.items()
            if whole
        }
        gone = doomed(values, written, c.keep, c.keep_best, c.mode)
        try:
            for step in [*(s for s, whole in there.items() if not whole), *gone]:
                self.remove(step)
        except OSError as error:
            raise OSError(
                f"that of step {written} is there, but an older one cannot be removed: {error}"
            ) from error

    def commit(self, beside: Path, names: list[str]) -> None:
        """Make the folder `beside` the checkpoint of its name; `names`: its files, the manifest last."""
        there = f"{self.root}/{beside.stem}"
        if self.fs.exists(there):
            self.remove(step_of(beside.stem))
        if self.local:
            beside.rename(there)
            fsync(Path(self.root))
            return
        try:
            self.fs.makedirs(there, exist_ok=True)
            for name in names:
                self.fs.put_file(str(beside / name), f"{there}/{name}")
        except OSError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise OSError(f"{self.shown(beside.stem)}: {type(error).__name__}: {error}") from error

    def remove(self, step: int) -> None:
        """The manifest first, so that what is left half-way is no checkpoint."""
        there = f"{self.root}/step_{step:05d}"
        if self.fs.exists(f"{there}/{MANIFEST}"):
            self.fs.rm_file(f"{there}/{MANIFEST}")
        self.fs.rm(there, recursive=True)

    def sweep(self) -> None:
        """Remove what a driver that was killed left half-written."""
        for stale in self.staging.glob("step_*.partial"):
            shutil.rmtree(stale)

    # ---- reading ----------------------------------------------------------------------------------------------

    def shown(self, name: str = "") -> str:
        return f"{self.address}/{name}".rstrip("/")

    def steps(self) -> dict[int, bool]:
        """Step -> whether its checkpoint is committed, oldest first; what is there decides, not what was remembered."""
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
        """What the metric was at that step; None where the checkpoint does not say."""
        try:
            return (
                json.loads(self.fs.cat_file(f"{self.root}/step_{step:05d}/{STATE}"))
                .get("metrics", {})
                .get(metric)
            )
        except (OSError, ValueError):  # damaged: never among the best
            return None

    def fetch(self, name: str) -> Path:
        """A verified local folder with the checkpoint `name`. Raises CheckpointError naming what is wrong with it."""
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
        """The newest checkpoint that verifies, as a local folder; each that does not is told to `refused` by name.
        None: there is none."""
        for step in reversed([*self.steps()]):
            try:
                return self.fetch(f"step_{step:05d}")
            except CheckpointError as error:
                refused(f"{error}; trying the one before it")
        return None


def open_store(cfg: Config, run_dir: Path) -> Store:
    """Where this run's checkpoints go: checkpoint.folder, or the run's own folder."""
    return Store(cfg.checkpoint.folder or str(run_dir / FOLDER), run_dir)


def check_best(cfg: Config) -> None:
    """Raise ConfigError where checkpoint.keep_best could never choose anything."""
    c, e = cfg.checkpoint, cfg.evaluation
    if not c.keep:
        raise ConfigError(
            "checkpoint.keep_best",
            c.keep_best,
            "checkpoint.keep=0 keeps every checkpoint",
            "Set checkpoint.keep to how many of the newest shall stay.",
        )
    try:
        metrics.describe(c.metric)
    except metrics.MetricError as error:
        raise ConfigError(
            "checkpoint.metric", c.metric, "no such metric", "Names: docs/metrics.md."
        ) from error
    if metrics.METRICS.get(c.metric, metrics.M("", "")).reduce == "spread":
        raise ConfigError(
            "checkpoint.metric",
            c.metric,
            f"expected {c.metric}/mean, {c.metric}/min or {c.metric}/max",
        )
    if not c.metric.startswith("eval/"):
        return
    known = [f"pass@{k}" for k in PASS_KS if k <= e.samples_during]
    known = [
        f"eval/{m}" for m in (*known, f"maj@{min(MAJ_K, e.samples_during)}", "format", "length")
    ]
    if c.metric not in known:
        raise ConfigError(
            "checkpoint.metric",
            c.metric,
            f"with evaluation.samples_during={e.samples_during} expected one of {', '.join(known)}",
        )
    if not (c.every and e.every) or math.lcm(c.every, e.every) >= cfg.steps:
        raise ConfigError(
            "checkpoint.keep_best",
            c.keep_best,
            "no checkpoint would be written at a step that is "
            f"evaluated: checkpoint.every={c.every}, evaluation.every={e.every}, steps={cfg.steps}",
            "Make checkpoint.every a multiple of evaluation.every.",
        )


def step_of(name: str) -> int:
    return int(name.removeprefix("step_"))


def doomed(
    found: Mapping[int, float | None], written: int, keep: int, keep_best: int, mode: str
) -> list[int]:
    """Steps whose checkpoints go once that of step `written` is there, oldest first. Pure.

    `found`: step -> value of the metric, or None. Those that stay: the newest `keep` (0: all) and, of those with a
    value, the `keep_best` best; of equal ones the later. Later than `written` is a continuation that was given up.
    """
    past = sorted(s for s in found if s <= written)
    sign = 1 if mode == "max" else -1
    ranked = sorted((sign * v, s) for s in past if (v := found[s]) is not None)
    stay = {
        written,
        *(past[-keep:] if keep else past),
        *(s for _, s in (ranked[-keep_best:] if keep_best else [])),
    }
    return sorted(set(found) - stay)


def digest(path: Path) -> str:
    """xxh3-128 of a file, as hex."""
    h = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            h.update(block)
    return h.hexdigest()


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify(folder: Path, shown: str = "") -> None:
    """Raise CheckpointError naming the first file that is missing, cut short or altered; `shown`: its address."""
    shown = f"checkpoint {shown or folder}"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        expected = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{shown}: no readable {MANIFEST}: {error}") from error
    if STATE not in expected:
        raise CheckpointError(f"{shown}: {MANIFEST} does not name {STATE}")
    for name, (size, checksum) in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{shown}: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{shown}: {name} has {path.stat().st_size} bytes, expected {size}"
            )
        if digest(path) != checksum:
            raise CheckpointError(f"{shown}: {name} does not match its checksum")


def changes(cfg: Config, saved: dict[str, Any]) -> list[str]:
    """ "key: saved -> now" of every setting that differs and is not harmless. `saved`: a Config as nested dicts."""

    def lookup(settings: Any, key: str) -> Any:
        for part in key.split("."):
            settings = settings.get(part) if isinstance(settings, dict) else None
        return settings

    out, now, saved = [], as_dict(cfg), portable(saved)  # config.yaml holds the path as it was
    for key in keys():
        old, new = lookup(saved, key), lookup(now, key)
        harmless = key.startswith(HARMLESS) and not (
            key == "steps" and cfg.optimizer.decay == "cosine"
        )
        if old != new and not harmless:
            out.append(f"{key}: {old} -> {new}")
    return out


def check_config(cfg: Config, saved: dict[str, Any], shown: str) -> None:
    """Raise CheckpointError listing what changed, unless allow_changes is set."""
    found = changes(cfg, saved)
    if found and not cfg.allow_changes:
        raise CheckpointError(
            f"checkpoint {shown} was written with other settings: {'; '.join(found)}. Give the same "
            "settings, or allow_changes=true to go on with the new ones."
        )


def as_dict(cfg: Config) -> dict[str, Any]:
    """The settings as a checkpoint holds them: without secrets, and with a model of the checkout by its place in there,
    since each job runs a copy of its own."""
    return portable(redact(dataclasses.asdict(cfg)))


def portable(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a model of this checkout by its place in there."""
    model = settings.get("model") or {}
    path = Path(model.get("path") or "")
    if not path.is_relative_to(ROOT):
        return settings
    return settings | {"model": model | {"path": str(path.relative_to(ROOT))}}
