"""Learned rewards: a causal language model, read where an answer (outcome) or a step (process) ends.

Two heads. `scalar`: a linear one on the last hidden state; on disk a Hugging Face sequence-classification directory
with one label, so that other libraries load what is trained here and the other way round. `implicit`: none, the reward
is the model's log-probability of the answer against that of the model it began as; on disk a causal LM with REFERENCE
beside it. What other libraries do not know stands in config.json (reward_service/models/meaning.py). Sequences are padded on
the right and carry no attention mask, as in actors/modeling/policy.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.modeling.loading import ModelError, source, weight_files
from actors.modeling.policy import Policy
from reward_service.models.meaning import Meaning, head_of

REFERENCE = (
    "reference.safetensors"  # what an implicit model began as: a causal LM of the same config.json
)


class RewardModel(nn.Module):
    """forward(ids int64 [B, T], rows [M], columns [M], begins [B]) -> float32 [M]: logits read at the tokens
    `ids[rows, columns]`; `begins`: where each answer does (not used by this head).

    `model`: a Hugging Face ...ForSequenceClassification with one label and its head in `score`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor, begins: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[
            rows, columns
        ]
        return self.model.score(hidden)[:, 0].float()

    def save_extra_files(self, folder: Path) -> None:
        """Files that belong into the model's directory besides its own: none."""


class ImplicitRewardModel(Policy):
    """`forward` as RewardModel's: beta * sum of log pi(token)/pi_ref(token) from the answer's first token to the one
    that is read (Yuan et al., 2412.01981, proposition 3.1: of a prefix it is the model's Q value, so what is trained on
    outcomes scores steps too). Trained on pairs it is DPO's reward (2305.18290). It begins as 0 everywhere.

    `model`, `reference`: causal LMs, the second never trained, and kept from DeepSpeed: whole on every rank."""

    def __init__(self, model: nn.Module, reference: nn.Module, beta: float, chunk: int) -> None:
        super().__init__(model, chunk)
        self.beta = beta
        self.reference = (
            Policy(reference.eval().requires_grad_(False), chunk),
        )  # a tuple: no part of this module

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor, begins: Tensor) -> Tensor:
        last = torch.zeros_like(begins).scatter_reduce(0, rows, columns, "amax")
        at = torch.arange(ids.shape[1], device=ids.device)
        r, c = ((at >= begins[:, None].clamp(min=1)) & (at <= last[:, None])).nonzero(as_tuple=True)
        with torch.no_grad():
            before, _ = self.reference[0].to(ids.device)(ids, r, c)
        ratios = super().forward(ids, r, c)[0] - before
        sums = torch.zeros(ids.shape, device=ids.device).index_put((r, c), ratios).cumsum(1)
        return self.beta * sums[rows, columns]

    def save_extra_files(self, folder: Path) -> None:
        """Write REFERENCE into the model's directory."""
        from safetensors.torch import save_file

        tensors = {
            n: p.detach().cpu().contiguous() for n, p in self.reference[0].model.named_parameters()
        }
        save_file(tensors, folder / REFERENCE, {"format": "pt"})


def load_reward_model(
    path: str,
    dtype: str = "float32",
    trained: bool = True,
    head: str = "scalar",
    beta: float = 0.0,
    chunk: int = 2048,
) -> RewardModel | ImplicitRewardModel:
    """The reward model of a Hugging Face directory or hub id, whose config.json says which head it has; with
    `trained=False` a causal LM will do, which gets `head` (and `beta`) and scores every answer 0 until it is trained.
    `chunk`: tokens whose logits an implicit one holds at once. Weights are only read from safetensors.

    Raises ModelError naming the path where it cannot be loaded, has no head, or more than one label."""
    from safetensors import SafetensorError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source(path), trust_remote_code=False)
        had, its = head_of(config.to_dict())
        if trained and not had:
            raise ModelError(
                f"reward model {path}: is no reward model: its architecture is {config.architectures}, "
                "without a score head. Train one: +experiment=train_orm."
            )
        if not trained and had and had != head:
            raise ModelError(
                f"reward model {path}: has the head {had}, not reward_model.head={head}. Set it so."
            )
        weight_files(path)
        config.use_cache = False
        if (had or head) == "implicit":
            return _implicit(path, config, bool(had), getattr(torch, dtype), its or beta, chunk)
        return _scalar(path, config, bool(had), getattr(torch, dtype))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"reward model {path}: cannot load: {str(error).splitlines()[0]}"
        ) from error


def _scalar(path: str, config: Any, had: bool, dtype: torch.dtype) -> RewardModel:
    from transformers import AutoModelForSequenceClassification

    if had and config.num_labels != 1:
        raise ModelError(
            f"reward model {path}: has {config.num_labels} labels; expected one score. "
            "Choose a model with num_labels=1."
        )
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_pretrained(
        source(path), config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"reward model {path}: {type(model).__name__} has no linear head `score`. Choose a decoder "
            "model (Llama, Qwen, Mistral, Gemma ...)."
        )
    if not had:
        nn.init.zeros_(model.score.weight)
    return RewardModel(model)


def _implicit(
    path: str, config: Any, had: bool, dtype: torch.dtype, beta: float, chunk: int
) -> ImplicitRewardModel:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import cached_file

    model = AutoModelForCausalLM.from_pretrained(
        source(path), config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    reference = copy.deepcopy(model)
    if had:
        tensors = load_file(cached_file(source(path), REFERENCE))
        wanted = {n for n, _ in reference.named_parameters()}
        if wanted != set(tensors):
            raise ModelError(
                f"reward model {path}: {REFERENCE} lacks or adds {sorted(wanted ^ set(tensors))[0]}. "
                "Train it anew: +experiment=train_orm reward_model.head=implicit."
            )
        reference.load_state_dict(tensors, strict=False)  # a tied head has no name of its own
    return ImplicitRewardModel(model, reference, beta, chunk)


def read_scores(logits: Tensor, how: Meaning) -> Tensor:
    """Logits [M] as rewards: probabilities where the model was trained to give them, else as they are."""
    return torch.sigmoid(logits) if how.probability else logits
