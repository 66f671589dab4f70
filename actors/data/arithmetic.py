"""The data set `arithmetic`: sums of a few numbers, generated from a seed.

The training and held-out sums are disjoint: the multiset of a sum's terms decides which split it
belongs to. Pure: standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from actors.data.prompt import Prompt, make_prompt, stable_hash, stable_rng
from actors.data.stream import Dataset, Fits, Get, check_split, first_distinct

HELDOUT_SHARE = 10  # one multiset of terms in ten belongs to the held-out split


def arithmetic_split(numbers: Sequence[int]) -> str:
    """The split a sum belongs to, "train" or "heldout". It does not depend on the order of the
    terms, so 12+34 and 34+12 are always in the same split."""
    bucket = int(stable_hash("arithmetic", sorted(numbers)), 16) % HELDOUT_SHARE
    return "heldout" if bucket == 0 else "train"


def arithmetic_numbers(
    rng: random.Random, split: str, terms: Sequence[int], max_number: int
) -> list[int]:
    """Draw the terms of one sum of `split`.

    The number of terms is drawn uniformly from `terms`, each term uniformly from 1..max_number.
    Raises ValueError for settings that admit no such sum.
    """
    check_split(split)
    if not terms or min(terms) < 2 or max_number < 1:
        raise ValueError(
            f"data.terms={list(terms)}, data.max_number={max_number}: expected at least one number "
            "of terms, each 2 or more, and a largest number of 1 or more"
        )
    count = rng.choice(list(terms))
    for _ in range(10_000):
        numbers = [rng.randint(1, max_number) for _ in range(count)]
        if arithmetic_split(numbers) == split:
            return numbers
    raise ValueError(
        f"data.max_number={max_number}: no sum of {count} terms belongs to the {split} side; "
        "raise it"
    )


def arithmetic_prompt(
    index: int,
    seed: int,
    split: str,
    terms: Sequence[int] = (2, 3, 4),
    max_number: int = 99,
    template: str = "short",
) -> Prompt:
    """The `index`-th sum of a split, e.g. "12+34+5=?" with gold "51". Level: the number of terms.

    A pure function of its arguments: no index depends on the ones before it.
    """
    rng = stable_rng("arithmetic", seed, split, index)
    numbers = arithmetic_numbers(rng, split, terms, max_number)
    return make_prompt(
        "+".join(map(str, numbers)) + "=?",
        str(sum(numbers)),
        template,
        data_source="arithmetic",
        task="math",
        level=len(numbers),
    )


def arithmetic_dataset(get: Get, split: str, fits: Fits) -> Dataset:
    """Sums as data.terms, data.max_number and data.seed describe them.

    Training data is endless unless data.size is set; held-out data has data.heldout_size sums.
    Raises ValueError when the longest possible prompt does not fit.
    """
    terms, largest = list(get("terms", (2, 3, 4))), get("max_number", 99)
    seed, template = get("seed", 0), get("template", "short")
    name = f"arithmetic/{split}/terms={'-'.join(map(str, terms))}/max={largest}/seed={seed}"

    def make(index: int) -> Prompt:
        return arithmetic_prompt(index, seed, split, terms, largest, template)

    question = "+".join([str(largest)] * max(terms)) + "=?"
    if not fits(make_prompt(question, "", template, data_source="", task="math")):
        raise ValueError(
            f"data.max_prompt_tokens={get('max_prompt_tokens')}: the longest prompt of "
            f"data.terms={terms} and data.max_number={largest} does not fit; raise it or shorten "
            f"data.template={template}"
        )
    if split == "heldout":
        return first_distinct(make, get("heldout_size", 64), fits, name)
    size = get("size", 0)
    if size:
        return first_distinct(make, size, fits, f"{name}/size={size}", "data.size")
    return Dataset(name, None, make)
