"""What a checkpoint holds of the controller, and how a run goes on from it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.prompts import Prompt
from actors.staleness import Ledger
from learner import checkpoint
from learner.config import Config

if TYPE_CHECKING:
    from learner.trainer import Trainer

# Fields of the trainer that are saved and restored as they are.
FIELDS = ("done", "version", "optimizer_steps", "before", "evaluations", "tokens", "generating_s", "worst_mismatch",
          "reference_reset_at")
REFERENCE = "reference.safetensors"  # there only after a reference reset


def find(cfg: Config, run_dir: Path) -> Path | None:
    """The folder to resume from, verified, with compatible settings; None to start anew. CheckpointError otherwise."""
    if cfg.resume == "never":
        return None
    given = Path(cfg.resume)
    if cfg.resume != "auto" and (given / checkpoint.MANIFEST).is_file():
        checkpoint.verify(given)
        found: Path | None = given
    else:
        found = checkpoint.newest(run_dir if cfg.resume == "auto" else given,
                                  lambda text: print(f"volley: {text}", file=sys.stderr, flush=True))
    if found is None and (cfg.resume != "auto" or checkpoint.committed(run_dir)):
        where = run_dir if cfg.resume == "auto" else given
        raise checkpoint.CheckpointError(f"resume={cfg.resume}: no usable checkpoint in {where}. Give another "
                                         "run_dir to start anew.")
    if found:
        checkpoint.check_config(cfg, json.loads((found / "trainer.json").read_text())["config"], found)
    return found


def state(trainer: Trainer) -> dict[str, Any]:
    """trainer.json: everything but tensors that the rest of the run depends on."""
    waiting = [t.prompt for t in trainer.dispatcher.tickets.values()] + [g.prompt for g in trainer.queue]
    ids = [*trainer.dispatcher.tickets, *(g.meta.group_id for g in trainer.queue)]
    books = trainer.ledger
    return {
        **{name: getattr(trainer, name) for name in FIELDS}, "sampler": trainer.sampler.state(),
        "wandb_id": trainer.log.wandb_id, "config": checkpoint.as_dict(trainer.cfg),
        "ledger": {"admitted": books.admitted, "trained": books.trained, "filtered": dict(books.filtered)},
        # Admitted and not trained: given out again on resume, under the same ids.
        "waiting": [[i, dataclasses.asdict(p)] for i, p in zip(ids, waiting, strict=True)]}


def restore(trainer: Trainer, saved: dict[str, Any]) -> list[tuple[int, Prompt]]:
    """The inverse of `state`; returns (group id, prompt) of the groups to be given out again, in order of id."""
    for name in FIELDS:
        setattr(trainer, name, saved[name])
    trainer.sampler.restore(saved["sampler"])
    waiting = [(int(i), Prompt(**p)) for i, p in saved["waiting"]]
    books = saved["ledger"]
    trainer.ledger = Ledger(books["admitted"], books["trained"], Counter(books["filtered"]),
                            in_flight={i for i, _ in waiting})
    trainer.ledger.check()
    return sorted(waiting, key=lambda pair: pair[0])
