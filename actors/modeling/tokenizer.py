"""The character-level tokenizer of the embedded base model, built in code.

It has one id for each printable ASCII character and the newline. Each of `<think>`, `</think>`,
`<answer>` and `</answer>` is one id too. They are ordinary tokens, not special ones, so that
decoding with skip_special_tokens=True keeps them for the reward rules to read. decode(encode(s)) ==
s for every string s of these characters and tags. Any other character becomes <unk>.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SPECIAL = (PAD, EOS, UNK)  # ids 0, 1, 2
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # ids 3 to 6
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # ids 7 to 102


def build_tokenizer(max_length: int = 128) -> Any:
    """Return a PreTrainedTokenizerFast of 103 ids.

    max_length: context of the model that it belongs to, in tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *TAGS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    # Each character is a word of its own.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # Without this, a word-level model would put spaces between the characters.
    backend.decoder = decoders.Fuse()
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
    """Build the tokenizer, write it to a Hugging Face directory and return it."""
    tokenizer = build_tokenizer(max_length)
    tokenizer.save_pretrained(str(directory))
    return tokenizer
