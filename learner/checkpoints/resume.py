"""Which checkpoint a run goes on from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from conf.schema import Config
from learner.checkpoints import checkpoint, saved_settings
from learner.checkpoints.checkpoint import CheckpointError, Store


def tell_refusal(text: str) -> None:
    """Tell the user of a damaged checkpoint that is passed over."""
    print(f"volley: {text}", file=sys.stderr, flush=True)


def find(cfg: Config, run_dir: Path, store: Store) -> Path | None:
    """The verified folder of the checkpoint to resume from; None to start anew.

    `store` is where this run's own checkpoints go. Raises CheckpointError where the checkpoint that
    `cfg.resume` names cannot be used, was written with other settings, or where the run's folder
    holds the checkpoints of another run.
    """
    source, name = store, ""
    if cfg.resume not in ("auto", "never"):
        head, _, last = cfg.resume.rstrip("/").rpartition("/")
        name = last if checkpoint.NAME.fullmatch(last) else ""
        source = Store(head or "." if name else cfg.resume, run_dir)
        if not name and not source.steps():
            source = Store(f"{cfg.resume.rstrip('/')}/{checkpoint.FOLDER}", run_dir)
    if store.steps() and (cfg.resume == "never" or source.root != store.root):
        raise CheckpointError(
            f"resume={cfg.resume}: {store.address} holds checkpoints of another run already. Give "
            "another run_dir or checkpoint.folder, or go on with that run: resume=auto."
        )
    if cfg.resume == "never":
        return None
    found = source.fetch(name) if name else source.newest(tell_refusal)
    if found is None and (cfg.resume != "auto" or store.steps()):
        raise CheckpointError(
            f"resume={cfg.resume}: no usable checkpoint in {source.address}. Give another run_dir "
            "to start anew."
        )
    if found:
        saved = json.loads((found / checkpoint.STATE).read_text())["config"]
        saved_settings.check_config(cfg, saved, source.shown(found.name))
    return found
