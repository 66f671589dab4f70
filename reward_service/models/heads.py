"""Learned rewards: a causal language model that is read where an answer or a step ends.

There are two heads. `scalar` is a linear head on the last hidden state. On disk it is a Hugging
Face sequence-classification directory with one label, so that models can be exchanged with other
libraries. `implicit` has no head: the reward is the log-probability of the answer under the model
minus that under the model from which training started. On disk it is a causal LM with the file
REFERENCE beside it. What other libraries do not know is written to config.json
(reward_service/models/meaning.py). Sequences are padded on the right and have no attention mask, as
in actors/modeling/policy.py.
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

# The weights from which an implicit model started: a causal LM with the same config.json.
REFERENCE = "reference.safetensors"


class RewardModel(nn.Module):
    """A reward model with a scalar head.

    forward(ids int64 [B, T], rows [M], columns [M], begins [B]) returns float32 [M], the logits at
    the tokens `ids[rows, columns]`. `begins` holds the position where each answer begins, which
    this head does not use. `model` is a Hugging Face ...ForSequenceClassification with one label
    and its head in `score`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor, begins: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[
            rows, columns
        ]
        return self.model.score(hidden)[:, 0].float()

    def save_extra_files(self, folder: Path) -> None:
        """Writes the additional files of the model's directory; a scalar head has none."""


class ImplicitRewardModel(Policy):
    """A reward model without a head; `forward` has the interface of RewardModel.

    The value at a token is beta * sum of log pi(token) / pi_ref(token), from the first token of the
    answer to that token. For a prefix this is the Q value of the model, so that a model trained on
    outcomes also scores steps (Yuan et al., arXiv:2412.01981, proposition 3.1). Trained on pairs it
    is the reward of DPO (arXiv:2305.18290). Before training the value is 0 everywhere.

    `model` and `reference` are causal LMs. The reference is never trained; it is hidden from
    DeepSpeed and therefore complete on every rank.
    """

    def __init__(self, model: nn.Module, reference: nn.Module, beta: float, chunk: int) -> None:
        super().__init__(model, chunk)
        self.beta = beta
        # In a tuple, so that torch does not register it as a part of this module.
        self.reference = (Policy(reference.eval().requires_grad_(False), chunk),)

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
        """Writes the reference model as REFERENCE into the model's directory."""
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
    """Loads a reward model from a Hugging Face directory or hub id.

    config.json says which head it has. With `trained=False` the model may be a causal LM without a
    head: it gets `head` (and `beta`) and scores every answer 0 until it is trained. `chunk` is the
    number of tokens whose logits an implicit model holds at a time. Weights are read from
    safetensors only. Raises ModelError naming the path if the model cannot be loaded, has no head,
    or has more than one label.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source(path), trust_remote_code=False)
        stored_head, stored_beta = head_of(config.to_dict())
        if trained and not stored_head:
            raise ModelError(
                f"reward model {path}: is no reward model: its architecture is "
                f"{config.architectures}, without a score head. Train one: +experiment=train_orm."
            )
        if not trained and stored_head and stored_head != head:
            raise ModelError(
                f"reward model {path}: has the head {stored_head}, not reward_model.head={head}. "
                "Set it so."
            )
        weight_files(path)
        config.use_cache = False
        if (stored_head or head) == "implicit":
            return _implicit(
                path, config, bool(stored_head), getattr(torch, dtype), stored_beta or beta, chunk
            )
        return _scalar(path, config, bool(stored_head), getattr(torch, dtype))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"reward model {path}: cannot load: {str(error).splitlines()[0]}"
        ) from error


def _scalar(path: str, config: Any, stored_head: bool, dtype: torch.dtype) -> RewardModel:
    from transformers import AutoModelForSequenceClassification

    if stored_head and config.num_labels != 1:
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
            f"reward model {path}: {type(model).__name__} has no linear head `score`. "
            "Choose a decoder model (Llama, Qwen, Mistral, Gemma ...)."
        )
    if not stored_head:
        nn.init.zeros_(model.score.weight)
    return RewardModel(model)


def _implicit(
    path: str, config: Any, stored_head: bool, dtype: torch.dtype, beta: float, chunk: int
) -> ImplicitRewardModel:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import cached_file

    model = AutoModelForCausalLM.from_pretrained(
        source(path), config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    reference = copy.deepcopy(model)
    if stored_head:
        tensors = load_file(cached_file(source(path), REFERENCE))
        names = {n for n, _ in reference.named_parameters()}
        if names != set(tensors):
            raise ModelError(
                f"reward model {path}: {REFERENCE} lacks or adds "
                f"{sorted(names ^ set(tensors))[0]}. "
                "Train it anew: +experiment=train_orm reward_model.head=implicit."
            )
        # Not strict: a head tied to the embedding has no name of its own.
        reference.load_state_dict(tensors, strict=False)
    return ImplicitRewardModel(model, reference, beta, chunk)


def read_scores(logits: Tensor, how: Meaning) -> Tensor:
    """Rewards [M] from logits [M]: probabilities if the model was trained to give them."""
    return torch.sigmoid(logits) if how.probability else logits
