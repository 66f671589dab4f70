"""The synthetic text on which the embedded base model is pre-trained: arithmetic of mixed quality.

A document is either a notebook page (sums worked without a mistake; no question, no tags) or a
conversation in the `short` template. Conversations mix the habits of SHARES. The base model learns
each habit about as often as it occurs here, and reinforcement learning later finds the habit that
is rewarded. Notebooks make the working reliable without making it frequent. All sums are of the
train split.

Everything is a pure function of the seed.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.data.arithmetic import arithmetic_numbers
from actors.data.prompt import TEMPLATES, stable_rng

NOTEBOOK_SHARE = 0.4  # of documents; the rest are conversations
# Shares of the conversations, by habit.
SHARES = {
    "blurt": 0.55,  # an answer at once, mostly wrong
    "steps": 0.23,  # running sum
    "check": 0.05,  # running sum, a doubt, the last step again
    "broken": 0.17,  # any of the above with a tag missing, no tags at all, or talk after the answer
}
BLURT_RIGHT = 0.12  # share of blurted answers that are right
SLIP = 0.01  # probability that one step of a worked answer is wrong; later steps go on from it
FILLERS = ("easy", "hm", "ok", "fast", "sure")  # what a blurted answer says instead of working


@dataclass(frozen=True)
class Document:
    """One text of the corpus. `prompt` is empty for a notebook page; `habit` is a key of SHARES, or
    "notebook"."""

    prompt: str
    completion: str
    habit: str
    numbers: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return self.prompt + self.completion


def near_miss(rng: random.Random, value: int) -> int:
    """A positive number near `value` but different: the units or the tens are off, as in hurried
    mental arithmetic."""
    while True:
        wrong = value + rng.choice((-20, -10, -9, -3, -2, -1, 1, 2, 3, 9, 10, 20))
        if wrong > 0:
            return wrong


def parts(number: int) -> list[int]:
    """The tens and the units of a number without zeros: 34 -> [30, 4], 30 -> [30], 4 -> [4]."""
    return [part for part in (number // 10 * 10, number % 10) if part]


def running_sum(rng: random.Random, numbers: Sequence[int], slip: float = SLIP) -> tuple[str, int]:
    """("12+30=42+4=46+5=51", 51) for 12+34+5: tens first, then units.

    Each part is added wrongly with probability `slip`; later steps go on from the wrong total.
    """
    total, text = numbers[0], str(numbers[0])
    for part in (part for number in numbers[1:] for part in parts(number)):
        total += part
        if rng.random() < slip:
            total = near_miss(rng, total)
        text += f"+{part}={total}"
    return text, total


def answer(thought: str, value: int) -> str:
    """A completion in the format that the rewards ask for."""
    return f"<think>{thought}</think><answer>{value}</answer>"


def blurted(rng: random.Random, numbers: Sequence[int]) -> str:
    """An answer without working, right in BLURT_RIGHT of the cases."""
    total = sum(numbers)
    value = total if rng.random() < BLURT_RIGHT else near_miss(rng, total)
    return answer(rng.choice(FILLERS), value)


def worked(rng: random.Random, numbers: Sequence[int]) -> str:
    """An answer with the running sum as its reasoning."""
    return answer(*running_sum(rng, numbers))


def checked(rng: random.Random, numbers: Sequence[int]) -> str:
    """A worked answer that doubts, and adds the last part again, correctly."""
    text, _ = running_sum(rng, numbers, slip=3 * SLIP)
    *_, before, last = re.findall(r"\d+", text)[:-1]
    total = int(before) + int(last)
    return answer(f"{text} wait {before}+{last}={total}", total)


def broken(rng: random.Random, numbers: Sequence[int]) -> str:
    """A blurted or worked answer in a wrong format."""
    whole = (blurted if rng.random() < 0.6 else worked)(rng, numbers)
    thought, value = (
        whole.removeprefix("<think>").removesuffix("</answer>").split("</think><answer>")
    )
    return rng.choice(
        (
            f"{value}",
            f"{thought}, so {value}",
            f"<think>{thought}</think>{value}",
            f"{thought}<answer>{value}</answer>",
            f"<think>{thought}<answer>{value}</answer>",
            f"<answer>{value}</answer>",
            f"{whole} ok?",
        )
    )


HABITS = {"blurt": blurted, "steps": worked, "check": checked, "broken": broken}


def conversation(
    rng: random.Random, terms: Sequence[int] = (2, 3, 4), max_number: int = 99
) -> Document:
    """A question and an answer, by a habit drawn from SHARES."""
    numbers = arithmetic_numbers(rng, "train", terms, max_number)
    habit = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    prompt = TEMPLATES["short"].render("+".join(map(str, numbers)) + "=?")
    return Document(prompt, HABITS[habit](rng, numbers), habit, tuple(numbers))


def notebook(
    rng: random.Random, terms: Sequence[int] = (2, 3, 4), max_number: int = 99, lines: int = 2
) -> Document:
    """A page of sums worked without a mistake, one a line: "12+34+5: 12+30=42+4=46+5=51"."""
    page = []
    for _ in range(lines):
        numbers = arithmetic_numbers(rng, "train", terms, max_number)
        page.append(f"{'+'.join(map(str, numbers))}: {running_sum(rng, numbers, slip=0)[0]}")
    return Document("", "\n".join(page), "notebook")


def documents(seed: int, notebook_share: float = NOTEBOOK_SHARE) -> Iterator[Document]:
    """The endless corpus of `seed`."""
    rng = stable_rng("corpus", seed)
    while True:
        yield notebook(rng) if rng.random() < notebook_share else conversation(rng)


def packed_batches(tokenizer: Any, seed: int, sequences: int, length: int) -> Iterator[np.ndarray]:
    """Endless training batches, int32 [sequences, length]: documents, each followed by <eos>.

    Every sequence starts with a new document, because a prompt is the start of a sequence when the
    model is used. The last document of a sequence is cut off. `tokenizer` has `eos_token_id` and
    turns a list of texts into {"input_ids": list of lists}.
    """
    source = token_lists(tokenizer, documents(seed))
    while True:
        batch = np.empty((sequences, length), dtype=np.int32)
        for row in batch:
            ids: list[int] = []
            while len(ids) < length:
                ids += next(source)
            row[:] = ids[:length]
        yield batch


def token_lists(
    tokenizer: Any, source: Iterator[Document], block: int = 512
) -> Iterator[list[int]]:
    """The token ids of each document and <eos>. Tokenises `block` documents at a time."""
    while True:
        texts = [document.text for document in itertools.islice(source, block)]
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            yield [*ids, tokenizer.eos_token_id]
