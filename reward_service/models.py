"""Learned rewards: a causal language model with a scalar head, read where an answer (outcome) or a step (process) ends.

On disk a Hugging Face sequence-classification directory with one label, so that other libraries load what is trained
here and the other way round. What they do not know stands in its config.json (reward_service/meaning.py).
Sequences are padded on the right and carry no attention mask, as in learner/model.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from learner.model import ModelError, source, weight_files
from reward_service.meaning import Meaning


class RewardModel(nn.Module):
    """forward(ids int64 [B, T], rows [M], columns [M]) -> float32 [M]: logits read at the tokens `ids[rows, columns]`.

    `model`: a Hugging Face ...ForSequenceClassification with one label and its head in `score`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[rows, columns]
        return self.model.score(hidden)[:, 0].float()


def load_reward_model(path: str, dtype: str = "float32", trained: bool = True) -> RewardModel:
    """The reward model of a Hugging Face directory or hub id; with `trained=False` a causal LM will do, whose new head
    is all 0 (every answer scores alike until it is trained). Weights are only read from safetensors.

    Raises ModelError naming the path where it cannot be loaded, has no head, or more than one label."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(source(path), trust_remote_code=False)
        has_head = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
        if trained and not has_head:
            raise ModelError(f"reward model {path}: is no reward model: its architecture is {config.architectures}, "
                             "without a score head. Train one: +experiment=train_orm.")
        if has_head and config.num_labels != 1:
            raise ModelError(f"reward model {path}: has {config.num_labels} labels; expected one score. "
                             "Choose a model with num_labels=1.")
        weight_files(path)
        config.num_labels, config.use_cache = 1, False
        model = AutoModelForSequenceClassification.from_pretrained(
            source(path), config=config, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"reward model {path}: cannot load: {str(error).splitlines()[0]}") from error
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(f"reward model {path}: {type(model).__name__} has no linear head `score`. Choose a decoder "
                         "model (Llama, Qwen, Mistral, Gemma ...).")
    if not has_head:
        nn.init.zeros_(model.score.weight)
    return RewardModel(model)


def read_scores(logits: Tensor, how: Meaning) -> Tensor:
    """Logits [M] as rewards: probabilities where the model was trained to give them, else as they are."""
    return torch.sigmoid(logits) if how.probability else logits
