"""What a checkpoint holds of the controller, and how a run goes on from it."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.data.prompt import Prompt
from actors.staleness import Ledger
from conf.schema import Config
from learner.checkpoints import checkpoint
from learner.checkpoints.checkpoint import CheckpointError, Store

if TYPE_CHECKING:
    from learner.stages.rl import Trainer

# Fields of the trainer that are saved and restored as they are.
FIELDS = (
    "done",
    "version",
    "optimizer_steps",
    "before",
    "evaluations",
    "tokens",
    "generating_s",
    "worst_mismatch",
    "reference_reset_at",
    "evaluated",
    "warned",
)
REFERENCE = "reference.safetensors"  # there only after a reference reset


def find(cfg: Config, run_dir: Path, store: Store) -> Path | None:
    """The folder to resume from, verified, with compatible settings; None to start anew. CheckpointError otherwise.

    `store`: where this run's own checkpoints go."""

    def refused(text: str) -> None:
        print(f"volley: {text}", file=sys.stderr, flush=True)

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
    found = source.fetch(name) if name else source.newest(refused)
    if found is None and (cfg.resume != "auto" or store.steps()):
        raise CheckpointError(
            f"resume={cfg.resume}: no usable checkpoint in {source.address}. Give another run_dir to "
            "start anew."
        )
    if found:
        saved = json.loads((found / checkpoint.STATE).read_text())["config"]
        checkpoint.check_config(cfg, saved, source.shown(found.name))
    return found


def state(trainer: Trainer) -> dict[str, Any]:
    """trainer.json: everything but tensors that the rest of the run depends on."""
    waiting = [t.prompt for t in trainer.dispatcher.tickets.values()] + [
        g.prompt for g in trainer.queue
    ]
    ids = [*trainer.dispatcher.tickets, *(g.meta.group_id for g in trainer.queue)]
    books = trainer.ledger
    return {
        **{name: getattr(trainer, name) for name in FIELDS},
        "sampler": trainer.sampler.state(),
        **({"refresher": trainer.refresher.state()} if trainer.refresher else {}),
        "wandb_id": trainer.log.wandb_id,
        "config": trainer.settings,
        "metrics": {
            name: value for name, value in trainer.measured.items() if math.isfinite(value)
        },
        "ledger": {
            "admitted": books.admitted,
            "trained": books.trained,
            "filtered": dict(books.filtered),
        },
        # Admitted and not trained: given out again on resume, under the same ids.
        "waiting": [[i, dataclasses.asdict(p)] for i, p in zip(ids, waiting, strict=True)],
    }


def last(trainer: Trainer) -> tuple[Path | None, dict[str, Any]]:
    """(folder, state) of the newest usable checkpoint of this run; where it has none yet, what it began with."""
    found = trainer.store.newest(lambda text: print(f"volley: {text}", file=sys.stderr, flush=True))
    if found:
        return found, json.loads((found / checkpoint.STATE).read_text())
    return trainer.saved, json.loads(json.dumps(trainer.origin))


def restore(
    trainer: Trainer, saved: dict[str, Any], folder: Path | None
) -> list[tuple[int, Prompt]]:
    """The inverse of `state`; returns (group id, prompt) of the groups to be given out again, in order of id.
    `folder`: the checkpoint's; None where the run goes back to its beginning."""
    for name in FIELDS:
        setattr(trainer, name, saved[name])
    trainer.sampler.restore(saved["sampler"])
    if trainer.refresher:
        trainer.refresher.restore(saved["refresher"], folder)
    waiting = [(int(i), Prompt(**p)) for i, p in saved["waiting"]]
    books = saved["ledger"]
    trainer.ledger = Ledger(
        books["admitted"],
        books["trained"],
        Counter(books["filtered"]),
        in_flight={i for i, _ in waiting},
    )
    trainer.ledger.check()
    return sorted(waiting, key=lambda pair: pair[0])
