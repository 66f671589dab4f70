"""The policy as a torch module: log-probs of given tokens, and entropy.

The whole [tokens, vocabulary] matrix of logits never exists at once: it is computed in chunks.
Sequences are right-padded and carry no attention mask. Under a causal mask no token that counts can
see what comes after it, so the width of the padding changes no value (DESIGN invariant 2).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actors.modeling.loading import ModelError

# A model with one of these settings scales or caps its logits, which `Policy` does not reproduce.
# Such a model is refused, because its log-probs would be wrong.
UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """A causal language model whose forward pass gives log-probs of chosen tokens.

    `model`: a Hugging Face causal LM. `chunk`: how many rows of the [tokens, vocabulary] matrix of
    logits exist at once, in the forward and in the backward pass. Raises ModelError for a model
    that rescales its logits.
    """

    def __init__(self, model: nn.Module, chunk: int) -> None:
        super().__init__()
        for name in UNSUPPORTED:
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise ModelError(
                    f"model.path: config.{name}={getattr(model.config, name)}: models that rescale "
                    "their logits are not supported. Choose another model."
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
        """Return (log-probs, entropy) of the tokens `ids[rows, columns]` given what precedes them.

        ids: int64 [B, T], right-padded.
        rows, columns: int64 [M] with columns >= 1.

        Log-probs: float32 [M]. Logits are first divided by `temperature`, which gives the
        distribution that the tokens were sampled from.
        Entropy: float32 [M] in nats if `entropy`, else None. It carries a gradient only with
        `entropy_grad`.
        With `full` the log-probs are those of the whole vocabulary, [M, V], and entropy is None.
        They are computed in one chunk, so ask for few tokens.
        """
        decoder = self.model.get_decoder()
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[rows, columns - 1]
        targets = ids[rows, columns]
        head = self.model.get_output_embeddings()
        if full:
            return torch.log_softmax(head(hidden).float() / temperature, dim=-1), None
        chunks = list(zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True))
        calls = _head_calls(head, len(chunks))
        # The head must be called equally often on every rank. The extra chunks have one row each,
        # and their values are dropped below.
        chunks += [(hidden[:1], targets[:1])] * (calls - len(chunks))
        outputs = []
        for chunk_hidden, chunk_targets in chunks:
            args = (head, chunk_hidden, chunk_targets, temperature, entropy, entropy_grad)
            # The backward pass recomputes each chunk's logits, so that none are kept meanwhile.
            outputs.append(
                checkpoint(_chunk_logprobs, *args, use_reentrant=False)
                if calls > 1 and torch.is_grad_enabled()
                else _chunk_logprobs(*args)
            )
        count = len(targets)
        logprobs = torch.cat([o[0] for o in outputs])
        # The extra rows are multiplied by 0 instead of cut off: their backward pass must run, since
        # under ZeRO-3 it is a collective too.
        logprobs = logprobs[:count] + 0.0 * logprobs[count:].sum()
        return logprobs, torch.cat([o[1] for o in outputs])[:count] if entropy else None

    def save_extra_files(self, folder: Path) -> None:
        """Write what the model's directory needs besides the model's own files: nothing."""


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, in place.

    Generators sample without dropout, and the learner must compute the same distribution.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _head_calls(head: nn.Module, chunks: int) -> int:
    """Return how often every rank calls the head: the largest number of chunks of any rank.

    Under ZeRO-3 each call gathers the head's weight from all ranks. A rank with fewer tokens, hence
    fewer chunks, would otherwise leave the others waiting forever.
    """
    sharded = any(hasattr(p, "ds_id") for p in head.parameters())
    if (
        not sharded
        or not torch.distributed.is_initialized()
        or torch.distributed.get_world_size() == 1
    ):
        return chunks
    largest = torch.tensor(chunks, device=next(head.parameters()).device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest)


def _chunk_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probs, entropy or None) of one chunk: `hidden` [m, H], `targets` int64 [m]."""
    logits = head(hidden).float() / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return logprobs, normaliser - (logits.softmax(-1) * logits).sum(-1)
