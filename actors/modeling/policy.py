"""The policy as a torch module: log-probs of given tokens, and entropy, without ever holding [tokens, vocabulary].

Sequences are padded on the right and carry no attention mask: under a causal mask nothing that counts can see what
comes after it, so the width of the padding changes no value (DESIGN invariant 2).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cluster.plan import ModelSize
from conf.schema import ConfigError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Output heads that scale or cap logits would need the same here; refused rather than computed wrongly.
UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class ModelError(RuntimeError):
    """The model cannot be loaded or used as configured; the message says which setting to change."""


class Policy(nn.Module):
    """A causal language model whose forward gives log-probs of chosen tokens.

    `chunk` bounds how many rows of the [tokens, vocabulary] matrix exist at once, forward and backward.
    """

    def __init__(self, model: nn.Module, chunk: int) -> None:
        super().__init__()
        for name in UNSUPPORTED:
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise ModelError(
                    f"model.path: config.{name}={getattr(model.config, name)}: models that rescale their "
                    "logits are not supported. Choose another model."
                )
        self.model, self.chunk = model, chunk

    def forward(
        self,
        ids: Tensor,
        rows: Tensor,
        columns: Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
        entropy_grad: bool = False,
        full: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs float32 [M] of tokens `ids[rows, columns]` given what precedes them; and entropy [M] if asked.

        ids: int64 [B, T], right-padded; rows, columns: int64 [M] with columns >= 1. Logits are divided by
        `temperature` first: the distribution the tokens were drawn from. Entropy is in nats; it carries a gradient
        only with `entropy_grad`. `full`: log-probs of the whole vocabulary, [M, V], for a few tokens (exact KL).
        """
        decoder = self.model.get_decoder()
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[rows, columns - 1]
        targets = ids[rows, columns]
        head = self.model.get_output_embeddings()
        if full:
            return torch.log_softmax(head(hidden).float() / temperature, dim=-1), None
        parts = list(zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True))
        wanted = _calls(head, len(parts))
        # Chunks that only keep the head's calls in step with other ranks: one row, whose value is left out below.
        parts += [(hidden[:1], targets[:1])] * (wanted - len(parts))
        pieces = []
        for part, target in parts:
            args = (head, part, target, temperature, entropy, entropy_grad)
            # Recomputed in backward, so that no chunk's logits outlive its turn.
            pieces.append(
                checkpoint(_logprobs, *args, use_reentrant=False)
                if wanted > 1 and torch.is_grad_enabled()
                else _logprobs(*args)
            )
        count = len(targets)
        logprobs = torch.cat([p[0] for p in pieces])
        # Times 0 rather than cut off: their backward must run on this rank too.
        logprobs = logprobs[:count] + 0.0 * logprobs[count:].sum()
        return logprobs, torch.cat([p[1] for p in pieces])[:count] if entropy else None

    def save_beside(self, folder: Path) -> None:
        """Files that belong into the model's directory besides its own: none."""


def _calls(head: nn.Module, wanted: int) -> int:
    """How often every rank calls the head in this forward pass: the most that any rank wants.

    Under ZeRO-3 each call gathers the head's weight from all ranks, so a rank with fewer tokens, hence fewer chunks,
    would leave the others waiting for ever."""
    sharded = any(hasattr(p, "ds_id") for p in head.parameters())
    if (
        not sharded
        or not torch.distributed.is_initialized()
        or torch.distributed.get_world_size() == 1
    ):
        return wanted
    most = torch.tensor(wanted, device=next(head.parameters()).device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def _logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden).float() / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return logprobs, normaliser - (logits.softmax(-1) * logits).sum(-1)


def source(path: str) -> str:
    """A local directory with ~ expanded, or a hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


def weight_files(path: str) -> list[Path]:
    """The safetensors of a local model directory, [] for a hub id. Raises ModelError where a directory has none."""
    folder = Path(source(path))
    if not folder.is_dir():
        return []
    found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        has = (
            f"only {', '.join(pickles)}, and a pickle can run code when it is opened"
            if pickles
            else "no weights"
        )
        raise ModelError(
            f"model.path={path}: has {has}; expected *.safetensors. Have its publisher's safetensors, or "
            "convert it where you trust it: load it and save_pretrained()."
        )
    return found


def model_size(cfg: Any) -> ModelSize:
    """Size of ModelConfig `cfg`'s model from its config and the headers of its weights; loads none of them."""
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    extra = {"gguf_file": cfg.gguf_file} if cfg.gguf_file else {}
    try:
        config = (
            LlamaConfig(**dict(cfg.architecture))
            if cfg.init == "random"
            else AutoConfig.from_pretrained(source(cfg.path), trust_remote_code=False, **extra)
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path={cfg.path}: no readable config.json: {str(error).splitlines()[0]}"
        ) from error
    count = 0
    for file in weight_files(cfg.path) if cfg.init == "pretrained" and not cfg.gguf_file else []:
        try:
            with safe_open(file, "pt") as tensors:
                count += sum(
                    math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()
                )  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(
                f"model.path={cfg.path}: {file.name} is damaged: {error}. Fetch it again."
            ) from error
    if not count:
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    text = config.get_text_config()
    return ModelSize(
        count, *(getattr(text, n, 0) for n in ("num_hidden_layers", "hidden_size", "vocab_size"))
    )


def load_model(cfg: Any, seed: int = 0) -> nn.Module:
    """The Hugging Face causal LM of ModelConfig `cfg`, on the CPU, in its dtype, eager-initialised when random.

    Weights are only read from safetensors (or GGUF). Raises ModelError naming the setting.
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
    """The tokenizer of ModelConfig `cfg`; raises ModelError naming the setting."""
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
    """A plain Hugging Face directory (safetensors + tokenizer) of the model, for engines that read one.

    Returns `cfg.path` itself where that already is such a directory; else writes `directory`.
    """
    if cfg.init == "pretrained" and not cfg.gguf_file:
        weight_files(cfg.path)
        return Path(cfg.path).expanduser()
    if not (directory / "config.json").is_file():
        model = load_model(cfg, seed)
        # A de-quantised GGUF model still calls itself quantised and would refuse to be saved.
        model.is_quantized, model.hf_quantizer = False, None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(directory)
        load_tokenizer(cfg).save_pretrained(directory)
    return directory


def disable_dropout(model: nn.Module) -> None:
    """The learner must compute the distribution the generator drew from, and that has no dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def stop_ids(tokenizer: Any, model_path: str) -> list[int]:
    """Ids that end a completion: the model's generation config and the tokenizer's own (several in some families)."""
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
