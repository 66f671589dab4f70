"""Checks of the training of a reward model: alone, within RL, and of the labels for it."""

from __future__ import annotations

from pathlib import Path

from conf.schema import Config, ConfigError
from reward_service.models.meaning import NEW, config_of, head_of


def check_reward_training(cfg: Config) -> None:
    """Raise ConfigError where a reward model could not be trained as the settings say.

    Steps of answers are labelled (stage=annotate) under the same conditions.
    """
    _check_refresh(cfg)
    if cfg.reward_model.refresh or cfg.stage.trains != "policy":
        _check_source(cfg)
        _check_head(cfg)
        _check_files(cfg)
        _check_labels(cfg)


def _check_refresh(cfg: Config) -> None:
    """Raise ConfigError where reward_model.refresh does not name a model to train within RL."""
    training = cfg.reward_model
    is_wanted = training.every or training.initial
    if (is_wanted and not training.refresh) or (training.refresh and not cfg.stage.evaluates):
        raise ConfigError(
            "reward_model.refresh",
            training.refresh,
            "names the model of reward.models that is trained beside a policy (stage=rl) by "
            f"reward_model.every={training.every} or reward_model.initial={training.initial}",
            "Name it, or leave both out.",
        )
    if training.refresh and training.refresh not in cfg.reward.models:
        raise ConfigError(
            "reward_model.refresh",
            training.refresh,
            f"expected one of reward.models: {', '.join(cfg.reward.models) or 'there is none'}",
        )


def _check_source(cfg: Config) -> None:
    """Raise ConfigError where the source of answers has no labels of the kind that is needed."""
    training = cfg.reward_model
    if training.kind == "process" and training.loss == "pairwise":
        raise ConfigError(
            "reward_model.loss",
            training.loss,
            "a process model has labels, not pairs",
            "Use pointwise.",
        )
    if training.kind == "process" and training.source == "policy":
        raise ConfigError(
            "reward_model.source",
            training.source,
            "samples of a policy have no label for each step",
            "Annotate some (+experiment=annotate_steps), then reward_model.source=files and "
            "reward_model.path=RUN_DIR/annotations.parquet; or reward_model.kind=outcome.",
        )
    if training.refresh and training.source != "policy":
        raise ConfigError(
            "reward_model.source",
            training.source,
            "a model is refreshed on samples of the policy",
            "Use reward_model.source=policy.",
        )


def _check_head(cfg: Config) -> None:
    """Raise ConfigError where training goes on with a model that has another head or beta."""
    training = cfg.reward_model
    served = cfg.reward.models.get(training.refresh, {}).get("path", NEW)
    start = training.init if served == NEW else served
    head, beta = head_of(config_of(start)) if start else ("", 0.0)
    if head and (head, beta or training.beta) != (training.head, training.beta):
        difference = f" with beta={beta}, not reward_model.beta={training.beta}" if beta else ""
        raise ConfigError(
            "reward_model.head",
            training.head,
            f"{start} is trained further, whose head is {head}{difference}",
            "Set both as it has them.",
        )


def _check_files(cfg: Config) -> None:
    """Raise ConfigError where files of labelled answers are needed and missing."""
    training = cfg.reward_model
    if training.source != "files":
        return
    for key in ("path", "heldout_path"):
        value = getattr(training, key)
        is_missing = bool(value) and not Path(value).expanduser().exists()
        if is_missing or (key == "path" and not value):
            raise ConfigError(
                f"reward_model.{key}",
                value,
                "expected a file or folder of labelled answers (Parquet or JSON lines; "
                "docs/rewards.md)",
            )


def _check_labels(cfg: Config) -> None:
    """Raise ConfigError where answers or their steps could not be labelled."""
    if cfg.stage.trains == "nothing" and not cfg.data.steps:
        raise ConfigError(
            "data.steps",
            "",
            "stage=annotate labels steps, and nothing says where they end",
            "Set it, such as newline.",
        )
    is_graded = cfg.reward_model.source == "policy" and not cfg.stage.evaluates
    if is_graded and "accuracy" not in cfg.reward.rules:
        raise ConfigError(
            "reward.rules",
            cfg.reward.rules,
            "samples are labelled by the rule accuracy",
            "Name it among them.",
        )
