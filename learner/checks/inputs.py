"""Checks of the model and of the source of prompts."""

from __future__ import annotations

import json
from pathlib import Path

from conf.schema import Config, ConfigError


def context_length(cfg: Config) -> int | None:
    """The model's context in tokens; None for a hub id, which is not downloaded for this.

    The context of such a model is checked when it is loaded.
    """
    if cfg.model.max_length:
        return cfg.model.max_length
    if cfg.model.init == "random":
        return cfg.model.architecture.get("max_position_embeddings")
    file = Path(cfg.model.path) / "config.json"
    return json.loads(file.read_text()).get("max_position_embeddings") if file.is_file() else None


def check_model(cfg: Config) -> None:
    """Raise ConfigError for a model folder that is none, and for a context that is too short."""
    path = cfg.model.path
    if cfg.model.init == "pretrained" and path.startswith(("/", "./", "../", "~")):
        if not (Path(path).expanduser() / (cfg.model.gguf_file or "config.json")).is_file():
            raise ConfigError(
                "model.path",
                path,
                "expected a Hugging Face model directory with a config.json",
                "Give a path that exists, or a hub id.",
            )
    if cfg.stage.answers == "corpus" and cfg.data.kind != "corpus":
        raise ConfigError(
            "data.kind", cfg.data.kind, "stage=pretrain reads a corpus", "Set data=corpus."
        )
    context, need = context_length(cfg), cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    if cfg.generates and context is not None and context < need:
        raise ConfigError(
            "rollout.max_tokens",
            cfg.rollout.max_tokens,
            f"the context of {cfg.model.name} is {context} tokens, but data.max_prompt_tokens="
            f"{cfg.data.max_prompt_tokens} + rollout.max_tokens={cfg.rollout.max_tokens} = {need}",
            "Lower one of the two, or choose a model with a longer context.",
        )


def check_data(cfg: Config) -> None:
    """Raise ConfigError for settings of data that its source needs or cannot use."""
    if cfg.data.kind == "files" and not cfg.data.path:
        raise ConfigError(
            "data.path",
            "",
            "data=files needs a file or folder of questions",
            "Set data.path, or data=FILE.",
        )
    if cfg.data.kind == "arithmetic" and not (cfg.data.terms and min(cfg.data.terms) >= 1):
        raise ConfigError(
            "data.terms",
            cfg.data.terms,
            "expected how many numbers a sum may have, such as [2,3,4]",
        )
    if cfg.data.size and cfg.data.kind != "arithmetic":
        raise ConfigError(
            "data.size",
            cfg.data.size,
            f"data.kind={cfg.data.kind} has a size of its own",
            "Leave it at 0.",
        )
    if cfg.data.sampler == "balanced" and not (cfg.data.kind == "files" or cfg.data.size):
        raise ConfigError(
            "data.sampler",
            cfg.data.sampler,
            f"prompts of data.kind={cfg.data.kind} never come again, so nothing is known of them",
            "Use data=FILE, or arithmetic with data.size.",
        )
