"""Finding and loading models and tokenizers: local directories, hub ids, GGUF files, random
weights.

Weights are read from safetensors or GGUF only, because a pickle can run code when it is opened.
`cfg` is conf.schema.ModelConfig throughout.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cluster.plan import ModelSize
from conf.schema import ConfigError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelError(RuntimeError):
    """A model cannot be loaded or used as configured. The message says which setting to change."""


def source(path: str) -> str:
    """Return a local directory with ~ expanded, or a hub id unchanged."""
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


def weight_files(path: str) -> list[Path]:
    """Return the safetensors files of a local model directory, sorted; [] for a hub id.

    Raises ModelError if a directory has none.
    """
    folder = Path(source(path))
    if not folder.is_dir():
        return []
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        content = (
            f"only {', '.join(pickles)}, and a pickle can run code when it is opened"
            if pickles
            else "no weights"
        )
        raise ModelError(
            f"model.path={path}: has {content}; expected *.safetensors. Have its publisher's "
            "safetensors, or convert it where you trust it: load it and save_pretrained()."
        )
    return files


def model_size(cfg: Any) -> ModelSize:
    """Return the size of the model from its config and the headers of its weights.

    No weight is loaded. Raises ModelError if the config or a weight file cannot be read.
    """
    from transformers import AutoModelForCausalLM

    config = _model_config(cfg)
    parameters = 0
    if cfg.init == "pretrained" and not cfg.gguf_file:
        parameters = sum(_parameters_in(file, cfg.path) for file in weight_files(cfg.path))
    if not parameters:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            parameters = sum(p.numel() for p in model.parameters())
    text = config.get_text_config()
    return ModelSize(
        parameters,
        *(getattr(text, n, 0) for n in ("num_hidden_layers", "hidden_size", "vocab_size")),
    )


def _model_config(cfg: Any) -> Any:
    """Return the Hugging Face config of the model. Raises ModelError if it cannot be read."""
    from transformers import AutoConfig, LlamaConfig

    extra = {"gguf_file": cfg.gguf_file} if cfg.gguf_file else {}
    try:
        if cfg.init == "random":
            return LlamaConfig(**dict(cfg.architecture))
        return AutoConfig.from_pretrained(source(cfg.path), trust_remote_code=False, **extra)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path={cfg.path}: no readable config.json: {str(error).splitlines()[0]}"
        ) from error


def _parameters_in(file: Path, path: str) -> int:
    """Return how many parameters a safetensors file holds, from its header alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    except SafetensorError as error:
        raise ModelError(
            f"model.path={path}: {file.name} is damaged: {error}. Fetch it again."
        ) from error


def load_model(cfg: Any, seed: int = 0) -> nn.Module:
    """Load the Hugging Face causal LM on the CPU, in its configured dtype.

    With init=random its weights are drawn from `seed`. Raises ModelError naming the setting.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    dtype = getattr(torch, cfg.dtype)
    if cfg.init == "random":
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**dict(cfg.architecture))).to(dtype)
    if not cfg.gguf_file:
        weight_files(cfg.path)
    try:
        extra = {"gguf_file": cfg.gguf_file} if cfg.gguf_file else {"use_safetensors": True}
        return AutoModelForCausalLM.from_pretrained(
            source(cfg.path), dtype=dtype, trust_remote_code=False, **extra
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"model.path={cfg.path}: cannot load a causal language model: "
            f"{str(error).splitlines()[0]}"
        ) from error


def load_tokenizer(cfg: Any) -> Any:
    """Load the Hugging Face tokenizer of the model. Raises ModelError naming the setting."""
    if cfg.tokenizer == "character":
        from actors.modeling.tokenizer import build_tokenizer

        return build_tokenizer(cfg.max_length or cfg.architecture["max_position_embeddings"])
    from transformers import AutoTokenizer

    path = cfg.tokenizer or cfg.path
    try:
        extra = {"gguf_file": cfg.gguf_file} if cfg.gguf_file else {}
        return AutoTokenizer.from_pretrained(source(path), trust_remote_code=False, **extra)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.tokenizer={path}: cannot load a tokenizer: {str(error).splitlines()[0]}"
        ) from error


def materialise(cfg: Any, directory: Path, seed: int = 0) -> Path:
    """Return a plain Hugging Face directory (safetensors and tokenizer) of the model.

    Engines such as vLLM read the model from it. It is `cfg.path` if that already is such a
    directory. Otherwise the model is written to `directory`, unless an earlier call has done so.
    """
    if cfg.init == "pretrained" and not cfg.gguf_file:
        weight_files(cfg.path)
        return Path(cfg.path).expanduser()
    if not (directory / "config.json").is_file():
        model = load_model(cfg, seed)
        # A GGUF model has been de-quantised on loading, but its config still says that it is
        # quantised, and save_pretrained would refuse it.
        model.is_quantized, model.hf_quantizer = False, None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(directory)
        load_tokenizer(cfg).save_pretrained(directory)
    return directory


def stop_ids(tokenizer: Any, model_path: str) -> list[int]:
    """Return the token ids that end a completion, sorted.

    They are those of the model's generation config (some model families have several) and the
    tokenizer's own. Raises ConfigError if there are none.
    """
    file = Path(model_path) / "generation_config.json"
    named = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = set(named if isinstance(named, list) else [] if named is None else [named])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(
            "model.tokenizer",
            tokenizer.name_or_path,
            "has no end-of-text token, so no completion ends",
        )
    return sorted(ids)
