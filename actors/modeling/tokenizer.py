"""The character-level tokenizer of the embedded base model, built from nothing.

One id per printable ASCII character and newline; `<think> </think> <answer> </answer>` are single ids but ordinary
(not special) tokens, so that decoding with skip_special_tokens=True keeps them for the reward rules to read.
For every string of those characters decode(encode(s)) == s; anything else becomes <unk>.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SPECIAL = (PAD, EOS, UNK)  # ids 0, 1, 2
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # ids 3 to 6
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # ids 7 to 102


def build_tokenizer(max_length: int = 128) -> Any:
    """A PreTrainedTokenizerFast of 103 ids. `max_length`: context of the model it belongs to, in tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *TAGS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"[\s\S]"), "isolated"
    )  # one character, one word
    backend.decoder = (
        decoders.Fuse()
    )  # join without the spaces a word-level model would put between words
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


def save_tokenizer(directory: str | Path, max_length: int = 128) -> Any:
    """Build the tokenizer, write it as a Hugging Face directory and return it."""
    tokenizer = build_tokenizer(max_length)
    tokenizer.save_pretrained(str(directory))
    return tokenizer
