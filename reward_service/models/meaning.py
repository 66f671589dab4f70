"""How the score of a reward model is to be read.

This module imports nothing heavy, because the check of the settings uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.schema import ConfigError
from conf.settings import choices

KEY = "volley_reward"  # the key of these fields in the config.json of a model
KINDS = choices("reward_model.kind")
NEW = "new"  # as a path: the initial weights of the policy, with a head that is not trained yet


@dataclass(frozen=True)
class Meaning:
    """How the score of a model is read.

    `kind` is outcome (one score, at the last token of the answer) or process (a score at the last
    token of each step). `probability` says that the output is the logit of a probability (pointwise
    loss). `steps` is the splitter with which the model was trained. `head` is scalar or implicit,
    the latter with its `beta` (reward_service/models/heads.py).
    """

    kind: str = "outcome"
    probability: bool = False
    steps: str = ""
    head: str = "scalar"
    beta: float = 0.0


def head_of(config: Mapping[str, Any]) -> tuple[str, float]:
    """(head, beta) of a model with this config.json: scalar or implicit; ("", 0) without a head."""
    fields = config.get(KEY) or {}
    if fields.get("head") == "implicit":
        return "implicit", fields["beta"]
    scored = any(
        name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()
    )
    return "scalar" if scored else "", 0.0


def config_of(path: str) -> dict[str, Any]:
    """The config.json of a local model directory; {} for a hub id, which is not downloaded."""
    file = Path(path).expanduser() / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def meaning(path: str, settings: Mapping[str, Any]) -> Meaning:
    """The meaning of the scores of the model at `path`.

    It is read from the model's config.json; a model that does not say is an outcome model with raw
    scores. `settings`, those of reward.models.NAME, override kind, probability and steps. Raises
    ConfigError for an unknown kind.
    """
    result = Meaning(
        **{
            **config_of(path).get(KEY, {}),
            **{k: v for k, v in settings.items() if k in asdict(Meaning())},
        }
    )
    if result.kind not in KINDS:
        raise ConfigError(
            "reward.models",
            f"{{path: {path}, kind: {result.kind}}}",
            f"expected a kind of {' or '.join(KINDS)}",
        )
    return result


def supervisor(cfg: Any) -> str:
    """Name of the process model that rewards steps (algorithm.advantage=process), or ""."""
    if cfg.algorithm.advantage != "process":
        return ""
    return next(
        (
            name
            for name, m in cfg.reward.models.items()
            if cfg.reward.rules.get(name) and meaning(m["path"], m).kind == "process"
        ),
        "",
    )
