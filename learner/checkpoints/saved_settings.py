"""Which settings may differ between the run that wrote a checkpoint and the run that resumes it.

The settings are saved in each checkpoint and as config.yaml in the run's folder. Pure.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from cluster.security import redact
from conf.schema import Config
from conf.settings import keys
from learner.checkpoints.checkpoint import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
# Settings that change where and how fast a run goes, or describe it, but not what it computes.
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


def changes(cfg: Config, saved: dict[str, Any]) -> list[str]:
    """Every setting that differs and is not harmless, as "key: saved -> now".

    `saved`: a Config as nested dicts."""

    def value_at(settings: Any, key: str) -> Any:
        for part in key.split("."):
            settings = settings.get(part) if isinstance(settings, dict) else None
        return settings

    now = as_dict(cfg)
    saved = portable(saved)  # config.yaml holds the model's path as it was given
    differences = []
    for key in keys():
        old, new = value_at(saved, key), value_at(now, key)
        if old != new and not _harmless(cfg, key):
            differences.append(f"{key}: {old} -> {new}")
    return differences


def _harmless(cfg: Config, key: str) -> bool:
    """The number of steps matters where the learning rate depends on it."""
    if key == "steps" and cfg.optimizer.decay == "cosine":
        return False
    return key.startswith(HARMLESS)


def check_config(cfg: Config, saved: dict[str, Any], address: str) -> None:
    """Raise CheckpointError listing what changed, unless allow_changes is set.

    `address`: that of the checkpoint, for the message."""
    differences = changes(cfg, saved)
    if differences and not cfg.allow_changes:
        raise CheckpointError(
            f"checkpoint {address} was written with other settings: {'; '.join(differences)}. "
            "Give the same settings, or allow_changes=true to go on with the new ones."
        )


def as_dict(cfg: Config) -> dict[str, Any]:
    """The settings as a checkpoint holds them: without secrets, and with a portable model path."""
    return portable(redact(dataclasses.asdict(cfg)))


def portable(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the path of a model in this checkout made relative to the checkout.

    Each submitted job runs in a copy of the checkout, so the absolute path differs between runs."""
    model = settings.get("model") or {}
    path = Path(model.get("path") or "")
    if not path.is_relative_to(ROOT):
        return settings
    return settings | {"model": model | {"path": str(path.relative_to(ROOT))}}
