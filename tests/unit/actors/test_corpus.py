"""The corpus: deterministic, train questions only, habits in their shares, working that is right
but for slips.
"""

import re
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from actors.data import corpus
from actors.data.arithmetic import arithmetic_split
from actors.data.prompt import stable_rng

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
    assert all(
        page.prompt == f"User: {'+'.join(map(str, page.numbers))}=?\nAssistant: "
        for page in conversations
    )


def chain(text):
    """("12+34:", "12+30=42+4=46") and the like -> [12], [30, 4], [42, 46]: start, parts, totals."""
    start, *rest = re.split(r"[+=]", text)
    return int(start), [int(part) for part in rest[::2]], [int(total) for total in rest[1::2]]


def test_tens_come_before_units_and_zeros_are_left_out():
    assert [corpus.parts(n) for n in (34, 30, 4)] == [[30, 4], [30], [4]]
    assert corpus.running_sum(stable_rng(), [12, 34, 5], slip=0) == ("12+30=42+4=46+5=51", 51)


def test_every_notebook_sum_is_of_the_train_split_and_right(pages):
    lines = [line for page in pages if page.habit == "notebook" for line in page.text.split("\n")]
    assert len(lines) > 1000
    for line in lines:
        question, working = line.split(": ")
        numbers = [int(number) for number in question.split("+")]
        start, parts, totals = chain(working)
        assert arithmetic_split(numbers) == "train"
        assert start == numbers[0] and sum(parts) == sum(numbers[1:])
        assert totals == [start + sum(parts[: i + 1]) for i in range(len(parts))]


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
    steps = slips = 0
    for page in (page for page in conversations if page.habit == "steps"):
        working, value = re.fullmatch(
            r"<think>([^<]*)</think><answer>(\d+)</answer>", page.completion
        ).groups()
        start, parts, totals = chain(working)
        assert start == page.numbers[0] and sum(parts) == sum(page.numbers[1:])
        assert totals[-1] == int(value)
        steps += len(parts)
        before = [start, *totals[:-1]]
        slips += sum(a + b != c for a, b, c in zip(before, parts, totals, strict=True))
    assert slips / steps == pytest.approx(corpus.SLIP, abs=0.005)


def test_a_check_says_wait_and_answers_what_the_check_found(conversations):
    checked = [page for page in conversations if page.habit == "check"]
    for page in checked:
        a, b, c = map(int, re.search(r"wait (\d+)\+(\d+)=(\d+)<", page.completion).groups())
        assert a + b == c and page.completion.endswith(f"<answer>{c}</answer>")
    assert np.mean([page.completion.endswith(f">{gold(page)}</answer>") for page in checked]) > 0.9


def test_broken_answers_never_have_the_asked_format(conversations):
    assert not any(
        re.fullmatch(TAGS, page.completion) for page in conversations if page.habit == "broken"
    )


def test_completions_fit_their_budget(conversations):
    assert (
        max(len(re.sub(r"</?(think|answer)>", "#", page.completion)) + 1 for page in conversations)
        <= 64
    )


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
