"""Checks of reward rules and of the reward models that are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf.schema import Config, ConfigError
from reward_service.models.meaning import NEW, meaning
from reward_service.rules.registry import RULES
from reward_service.step_labels.steps import splitter

MODEL_SETTINGS = ("path", "kind", "probability", "steps")  # keys of reward.models.NAME


def check_rewards(cfg: Config) -> None:
    """Raise ConfigError for rewards that do not exist, count nothing, or penalise twice."""
    if cfg.data.steps:
        try:
            splitter(cfg.data.steps)
        except ValueError as error:
            expected = str(error).partition(": ")[2]
            raise ConfigError("data.steps", cfg.data.steps, f"{expected}, or nothing") from error
    rules = cfg.reward.rules
    if cfg.algorithm.options.get("overlong_share") and "soft_overlong" in rules:
        raise ConfigError(
            "reward.rules.soft_overlong",
            rules["soft_overlong"],
            "algorithm.options.overlong_share already takes off the same penalty",
            "Use one of the two.",
        )
    if not rules:
        raise ConfigError("reward.rules", rules, "expected at least one rule with a weight")
    known = sorted({*RULES, *_own_rules(cfg), *cfg.reward.models})
    for name in rules:
        if name not in known:
            raise ConfigError(
                f"reward.rules.{name}",
                rules[name],
                f"unknown rule, expected one of {', '.join(known)}",
            )
    if not any(rules.values()):
        raise ConfigError("reward.rules", rules, "every weight is 0: nothing is rewarded")
    for name, settings in cfg.reward.models.items():
        _check_declaration(cfg, name, settings)
        _check_folder(cfg, name, settings)


def _own_rules(cfg: Config) -> dict[str, Any]:
    """The user's own functions by name (reward.options.custom)."""
    return cfg.reward.options.get("custom") or {}


def _check_declaration(cfg: Config, name: str, settings: Any) -> None:
    """Raise ConfigError where reward.models.NAME is not what a reward model needs."""
    key = f"reward.models.{name}"
    if name in RULES or name in _own_rules(cfg):
        raise ConfigError(key, settings, "there is a rule of this name", "Choose another.")
    if not isinstance(settings, dict) or not isinstance(settings.get("path"), str):
        raise ConfigError(
            key,
            settings,
            "expected a path: the folder or hub id of a reward model",
            f"{key}.path=outputs/RUN/model; +experiment=train_orm makes one.",
        )
    if unknown := sorted(set(settings) - set(MODEL_SETTINGS)):
        raise ConfigError(
            f"{key}.{unknown[0]}",
            settings[unknown[0]],
            f"unknown; known are {', '.join(MODEL_SETTINGS)}",
        )
    if name not in cfg.reward.rules:
        raise ConfigError(
            key,
            settings["path"],
            "has no weight",
            f"Give one: +reward.rules.{name}=1.0 (0: only measured).",
        )


def _check_folder(cfg: Config, name: str, settings: dict[str, Any]) -> None:
    """Raise ConfigError where the model's folder cannot be served, or its steps have no end."""
    key, path, training = f"reward.models.{name}.path", settings["path"], cfg.reward_model
    if path == NEW:
        if not (training.refresh == name and training.initial):
            raise ConfigError(
                key,
                path,
                "a new model says nothing before it is trained",
                f"Set reward_model.refresh={name} and reward_model.initial=true, or give a "
                "trained one.",
            )
        return
    is_local = path.startswith(("/", ".", "~", "outputs/"))
    if is_local and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigError(
            key,
            path,
            "expected a Hugging Face directory with a config.json",
            "Give a path that exists, or a hub id.",
        )
    scores = meaning(path, settings)
    if scores.kind == "process" and not (scores.steps or cfg.data.steps):
        raise ConfigError(
            "data.steps",
            "",
            f"the process model {name} scores steps, and nothing says where they end",
            "Set data.steps, such as newline.",
        )
