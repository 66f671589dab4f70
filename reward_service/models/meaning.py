"""How the score of a reward model is read. As light as conf/schema.py, which checks settings by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.schema import ConfigError

KEY = "volley_reward"  # in the config.json of a model
KINDS = ("outcome", "process")
NEW = "new"  # as path: the policy's initial weights with a head that is still to be trained


@dataclass(frozen=True)
class Meaning:
    """How a model's score is read. `kind`: outcome (a score at an answer's last token) or process (one at each step's);
    `probability`: its logit is that of a probability (pointwise loss); `steps`: the splitter it was trained with;
    `head`: scalar or implicit, with its `beta` (reward_service/models/heads.py)."""

    kind: str = "outcome"
    probability: bool = False
    steps: str = ""
    head: str = "scalar"
    beta: float = 0.0


def head_of(config: Mapping[str, Any]) -> tuple[str, float]:
    """(scalar | implicit, beta) that a model with this config.json has; ("", 0) where it has no head yet."""
    told = config.get(KEY) or {}
    if told.get("head") == "implicit":
        return "implicit", told["beta"]
    scored = any(
        name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()
    )
    return "scalar" if scored else "", 0.0


def config_of(path: str) -> dict[str, Any]:
    """The config.json of a local model directory; {} of a hub id, which is not fetched for that."""
    file = Path(path).expanduser() / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def meaning(path: str, settings: Mapping[str, Any]) -> Meaning:
    """What config.json of the model at `path` says, or a plain outcome model's (raw score) where it says nothing; what
    `settings`, those of reward.models.NAME, say (kind, probability, steps) wins. Raises ConfigError."""
    found = Meaning(
        **{
            **config_of(path).get(KEY, {}),
            **{k: v for k, v in settings.items() if k in asdict(Meaning())},
        }
    )
    if found.kind not in KINDS:
        raise ConfigError(
            "reward.models",
            f"{{path: {path}, kind: {found.kind}}}",
            f"expected a kind of {' or '.join(KINDS)}",
        )
    return found


def supervisor(cfg: Any) -> str:
    """The process model whose scores reward the single steps (algorithm.advantage=process); "" where there is none."""
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
