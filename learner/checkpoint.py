"""Checkpoints as transactions: written beside, checksummed, fsynced, renamed; only then may an older one go.

    RUN_DIR/checkpoints/step_00012/   policy.safetensors  critic.safetensors  trainer.json  manifest.json

A checkpoint without a manifest, or whose files do not match it, is refused by name and the one before it is used
(DESIGN invariant 7). Tensors are whole (not sharded) float32 safetensors, so a run may resume with other ranks or
another ZeRO stage, and nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from learner.config import Config, keys
from learner.config import get as setting

FOLDER, MANIFEST = "checkpoints", "manifest.json"
# Settings that change where and how fast a run goes, not what it computes.
HARMLESS = ("steps", "run_dir", "resume", "allow_changes", "model.path", "model.init", "model.tokenizer",
            "model.gguf_file", "generator.", "learner.ranks", "learner.zero_stage", "learner.micro_batch_tokens",
            "learner.logprob_chunk_tokens", "learner.timeout_s", "learner.cpus", "learner.gpus", "reference.",
            "evaluation.", "cluster.", "logging.", "checkpoint.", "reward.workers", "reward.timeout_s",
            "rollout.timeout_s")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names it, what is wrong with it and what to do."""


def digest(path: Path) -> str:
    """xxh3-128 of a file, as hex."""
    h = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            h.update(block)
    return h.hexdigest()


def write(run_dir: Path, step: int, state: dict[str, Any], save_tensors: Callable[[Path], None], keep: int) -> Path:
    """Commit the checkpoint of `step`, then prune to the newest `keep`. `save_tensors(folder)` writes *.safetensors.

    A failure (a full disk) leaves older checkpoints as they are and no half-written one behind; raises OSError.
    """
    final = run_dir / FOLDER / f"step_{step:05d}"
    beside = final.with_suffix(".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        save_tensors(beside)
        (beside / "trainer.json").write_text(json.dumps(state, indent=1))
        files = sorted(p for p in beside.iterdir())
        manifest = {p.name: {"bytes": p.stat().st_size, "xxh3_128": digest(p)} for p in files}
        (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*files, beside / MANIFEST, beside]:
            fsync(path)
        if final.exists():
            shutil.rmtree(final)
        beside.rename(final)
        fsync(final.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    prune(run_dir, keep)
    return final


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` committed checkpoints; what is on disk decides, not what was remembered."""
    for old in committed(run_dir)[: -keep or None] if keep else []:
        shutil.rmtree(old)


def committed(run_dir: Path) -> list[Path]:
    """Folders with a manifest, oldest first."""
    return sorted(p.parent for p in (run_dir / FOLDER).glob(f"step_*/{MANIFEST}"))


def verify(folder: Path) -> None:
    """Raise CheckpointError naming the first file that is missing, cut short or altered."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: no readable {MANIFEST}: {error}") from error
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder}: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(f"checkpoint {folder}: {name} has {path.stat().st_size} bytes, "
                                  f"expected {expected['bytes']}")
        if digest(path) != expected["xxh3_128"]:
            raise CheckpointError(f"checkpoint {folder}: {name} does not match its checksum")


def newest(run_dir: Path, refused: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; each one that does not is told to `refused` by name. None: there is none."""
    for folder in reversed(committed(run_dir)):
        try:
            verify(folder)
        except CheckpointError as error:
            refused(f"{error}; trying the one before it")
            continue
        return folder
    return None


def changes(cfg: Config, saved: dict[str, Any]) -> list[str]:
    """"key: saved -> now" of every setting that differs and is not harmless. `saved`: a Config as nested dicts."""
    out = []
    for key in keys(cfg):
        old: Any = saved
        for part in key.split("."):
            old = old.get(part) if isinstance(old, dict) else None
        new = setting(cfg, key)
        if old != new and not key.startswith(HARMLESS):
            out.append(f"{key}: {old} -> {new}")
    return out


def check_config(cfg: Config, saved: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError listing what changed, unless allow_changes is set."""
    found = changes(cfg, saved)
    if found and not cfg.allow_changes:
        raise CheckpointError(f"checkpoint {folder} was written with other settings: {'; '.join(found)}. Give the same "
                              "settings, or allow_changes=true to go on with the new ones.")


def as_dict(cfg: Config) -> dict[str, Any]:
    return dataclasses.asdict(cfg)
