"""The corpus: deterministic, train questions only, habits in their shares, working that is right but for slips."""

import re
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from actors.prompts import arithmetic_split
from learner import corpus

TAGS = r"<think>[^<]*</think><answer>(\d+)</answer>"


@pytest.fixture(scope="module")
def pages():
    return list(islice(corpus.documents(0), 12_000))


@pytest.fixture(scope="module")
def conversations(pages):
    return [page for page in pages if page.habit != "notebook"]


def gold(page):
    return str(sum(page.numbers))


def test_the_corpus_is_a_function_of_its_seed():
    a, b, c = (list(islice(corpus.documents(seed), 50)) for seed in (1, 1, 2))
    assert a == b and a != c


def test_only_train_questions_are_asked(conversations):
    assert all(arithmetic_split(page.numbers) == "train" for page in conversations)
    assert all(page.prompt == f"User: {'+'.join(map(str, page.numbers))}=?\nAssistant: " for page in conversations)


def test_no_notebook_line_is_a_heldout_question_and_every_line_is_right(pages):
    lines = [re.findall(r"(\d+)\+(\d+)=(\d+)", page.text) for page in pages if page.habit == "notebook"]
    for a, b, c in (map(int, line) for page in lines for line in page):
        assert a + b == c
        assert a > 99 or arithmetic_split((a, b)) == "train"
    assert sum(map(len, lines)) > 1000


def test_habits_occur_in_their_documented_shares(pages, conversations):
    counts = Counter(page.habit for page in conversations)
    assert len(conversations) / len(pages) == pytest.approx(1 - corpus.NOTEBOOK_SHARE, abs=0.02)
    assert sum(corpus.SHARES.values()) == pytest.approx(1)
    for habit, share in corpus.SHARES.items():
        assert counts[habit] / len(conversations) == pytest.approx(share, abs=0.02)


def test_blurted_answers_are_well_formed_short_and_mostly_wrong(conversations):
    blurts = [page for page in conversations if page.habit == "blurt"]
    answers = [re.fullmatch(TAGS, page.completion) for page in blurts]
    assert all(answers) and all("+" not in page.completion for page in blurts)
    right = np.mean([match[1] == gold(page) for match, page in zip(answers, blurts, strict=True)])
    assert right == pytest.approx(corpus.BLURT_RIGHT, abs=0.02)


def test_worked_answers_follow_from_their_steps_and_slips_are_rare(conversations):
    worked = [page for page in conversations if page.habit == "steps"]
    steps = slips = 0
    for page in worked:
        lines = [tuple(map(int, line)) for line in re.findall(r"(\d+)\+(\d+)=(\d+)", page.completion)]
        assert [line[1] for line in lines] == list(page.numbers[1:])
        assert [line[0] for line in lines] == [page.numbers[0], *(line[2] for line in lines[:-1])]
        assert re.fullmatch(TAGS, page.completion)[1] == str(lines[-1][2])
        steps += len(lines)
        slips += sum(a + b != c for a, b, c in lines)
    assert slips / steps == pytest.approx(corpus.SLIP, abs=0.01)


def test_a_check_says_wait_and_answers_what_the_check_found(conversations):
    checked = [page for page in conversations if page.habit == "check"]
    for page in checked:
        a, b, c = map(int, re.search(r"wait (\d+)\+(\d+)=(\d+)<", page.completion).groups())
        assert a + b == c and page.completion.endswith(f"<answer>{c}</answer>")
    assert np.mean([page.completion.endswith(f">{gold(page)}</answer>") for page in checked]) > 0.9


def test_broken_answers_never_have_the_asked_format(conversations):
    assert not any(re.fullmatch(TAGS, page.completion) for page in conversations if page.habit == "broken")


def test_completions_fit_their_budget(conversations):
    assert max(len(re.sub(r"</?(think|answer)>", "#", page.completion)) + 1 for page in conversations) <= 64


class Characters(SimpleNamespace):
    """Stands for the tokenizer: code points as ids."""

    eos_token_id = 0

    def __call__(self, texts, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def test_packed_batches_open_with_a_document_and_repeat_it_in_order():
    batch = next(corpus.packed_batches(Characters(), seed=3, sequences=4, length=200))
    assert batch.shape == (4, 200) and batch.dtype == np.int32
    source = corpus.documents(3)
    for row in batch:
        text = ""
        while len(text) < 200:
            text += next(source).text + "\0"
        assert "".join(map(chr, row)) == text[:200]


def test_packed_batches_continue_and_are_deterministic():
    a, b = (list(islice(corpus.packed_batches(Characters(), 3, 2, 64), 3)) for _ in range(2))
    assert all((x == y).all() for x, y in zip(a, b, strict=True)) and not (a[0] == a[1]).all()
