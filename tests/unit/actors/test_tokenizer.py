"""The character-level tokenizer: every string of the task survives, tags are one token and are
kept.
"""

import random

import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from actors.data.corpus import documents
from actors.data.prompt import TEMPLATES
from actors.modeling.tokenizer import CHARACTERS, TAGS, build_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, max_length=128)
    return AutoTokenizer.from_pretrained(directory)


def test_every_string_of_its_characters_round_trips(tokenizer, reloaded):
    rng = random.Random(0)
    texts = [
        "",
        " ",
        "  a  b , c . don't !?\n\n",
        "<think> </think>\n<answer>7",
        "<thin k></ans wer>",
    ]
    texts += ["".join(rng.choices([*CHARACTERS, *TAGS], k=40)) for _ in range(300)]
    texts += [TEMPLATES["r1_zero"].render("1+1=?")] + [next(documents(0)).text for _ in range(50)]
    for text in texts:
        for each in (tokenizer, reloaded):
            ids = each.encode(text)
            assert each.decode(ids) == each.decode(ids, skip_special_tokens=True) == text


def test_tags_are_single_tokens_that_decoding_keeps(reloaded):
    ids = reloaded.encode("<think>1</think><answer>2</answer>")
    assert len(ids) == 6
    assert reloaded.decode([*ids, reloaded.eos_token_id], skip_special_tokens=True).endswith(
        "</answer>"
    )
    assert reloaded.decode([*ids, reloaded.eos_token_id]).endswith("<eos>")


def test_the_vocabulary_is_small_and_nothing_is_inserted(reloaded):
    assert len(reloaded) == 103 and reloaded.model_max_length == 128
    assert len(reloaded.encode("a b\nc")) == 5  # neither bos nor eos
    assert len({reloaded.pad_token_id, reloaded.eos_token_id, reloaded.unk_token_id}) == 3


def test_an_unknown_character_is_unk(tokenizer):
    assert tokenizer.encode("1é2") == [
        tokenizer.encode("1")[0],
        tokenizer.unk_token_id,
        tokenizer.encode("2")[0],
    ]
