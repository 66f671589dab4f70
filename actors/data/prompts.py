"""Prompts: what a prompt is, how it is rendered, where it comes from and in which order it is drawn.

Pure: standard library and NumPy; reasoning-gym, pyarrow and datasets are imported only by the sources that read them.
Every source is a `Dataset`, a function from an index to a `Prompt`; `PromptStream` decides the order. Both are
functions of plain integers, so a run resumed at a cursor draws exactly what an uninterrupted run would have drawn.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 10  # one operand multiset in ten belongs to the held-out side
STREAM_STRIDE = (
    1 << 40
)  # an endless data set gives each stream seed a range of this many indices of its own


@dataclass(frozen=True)
class Prompt:
    """One question, rendered. `prompt_id` is the same wherever the same question appears.

    Example: Prompt("3f2a...", "12+34=?", "46", "User: 12+34=?\\nAssistant: ", "", "arithmetic", "math", {}, 2)
    """

    prompt_id: str
    question: str
    gold: str  # the reference answer as the data set stores it
    text: str  # the rendered template: exactly what is tokenised
    prefill: str  # the end of `text` that already belongs to the response; graded together with the completion
    data_source: str
    task: str  # which verifier grades it: math | countdown | reasoning_gym | code | ...
    extra: dict[str, Any] = field(default_factory=dict)  # JSON-able; what that verifier needs
    level: int = 0  # difficulty within the data set, 0 where unknown


# --- templates -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Template:
    """`body` holds {question} once; `prefill`, if any, is appended and counts as the start of the response."""

    body: str
    prefill: str = ""

    def render(self, question: str) -> str:
        return self.body.replace("{question}", question) + self.prefill


# r1_zero: the conversation template of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), put in our own words.
TEMPLATES: dict[str, Template] = {
    "r1_zero": Template(
        "What follows is a conversation between a User and an Assistant. The User asks a question and the Assistant "
        "works out the solution. The Assistant first reasons about the problem in its mind and only then gives the "
        "User the answer. The reasoning stands between <think> and </think>, the answer between <answer> and "
        "</answer>, like this: <think> the reasoning </think> <answer> the answer </answer>.\n"
        "User: {question}\nAssistant:"
    ),
    "short": Template("User: {question}\nAssistant: "),
    "none": Template("{question}"),
}


def find_template(name: str) -> Template:
    """The template called `name`; ValueError listing the known ones otherwise."""
    if name not in TEMPLATES:
        raise ValueError(f"data.template={name}: expected one of {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def make_prompt(
    question: str,
    gold: str,
    template: str,
    *,
    data_source: str,
    task: str,
    extra: dict[str, Any] | None = None,
    level: int = 0,
) -> Prompt:
    """Render a question; its id is a hash of data source and question."""
    layout = find_template(template)
    return Prompt(
        prompt_id=stable_hash(data_source, question),
        question=question,
        gold=gold,
        text=layout.render(question),
        prefill=layout.prefill,
        data_source=data_source,
        task=task,
        extra=extra or {},
        level=level,
    )


def stable_hash(*parts: Any) -> str:
    """16 hex digits, the same in every process and Python version (unlike `hash`)."""
    return hashlib.blake2b(
        json.dumps(parts, ensure_ascii=False).encode(), digest_size=8
    ).hexdigest()


def stable_rng(*parts: Any) -> random.Random:
    """A generator seeded by `parts` and nothing else."""
    return random.Random(int(stable_hash(*parts), 16))


# --- arithmetic ------------------------------------------------------------------------------------------------------
def arithmetic_split(numbers: Sequence[int]) -> str:
    """The side a sum belongs to, whatever the order of its terms: 12+34 and 34+12 are never on two sides."""
    return (
        "heldout"
        if int(stable_hash("arithmetic", sorted(numbers)), 16) % HELDOUT_SHARE == 0
        else "train"
    )


def arithmetic_numbers(
    rng: random.Random, split: str, terms: Sequence[int], max_number: int
) -> list[int]:
    """Draw the terms of one sum of `split`: how many uniformly from `terms`, each uniformly from 1..max_number."""
    _check_split(split)
    if not terms or min(terms) < 2 or max_number < 1:
        raise ValueError(
            f"data.terms={list(terms)}, data.max_number={max_number}: expected at least one number of "
            "terms, each 2 or more, and a largest number of 1 or more"
        )
    count = rng.choice(list(terms))
    for _ in range(10_000):
        numbers = [rng.randint(1, max_number) for _ in range(count)]
        if arithmetic_split(numbers) == split:
            return numbers
    raise ValueError(
        f"data.max_number={max_number}: no sum of {count} terms belongs to the {split} side; raise it"
    )


def arithmetic_prompt(
    index: int,
    seed: int,
    split: str,
    terms: Sequence[int] = (2, 3, 4),
    max_number: int = 99,
    template: str = "short",
) -> Prompt:
    """The `index`-th sum of a split, e.g. "12+34+5=?" with gold "51"; level = number of terms.

    A pure function of its arguments: any index can be asked for without making those before it.
    """
    numbers = arithmetic_numbers(
        stable_rng("arithmetic", seed, split, index), split, terms, max_number
    )
    return make_prompt(
        "+".join(map(str, numbers)) + "=?",
        str(sum(numbers)),
        template,
        data_source="arithmetic",
        task="math",
        level=len(numbers),
    )


# --- data sets and the order they are drawn in -----------------------------------------------------------------------
@dataclass
class Dataset:
    """Prompts by index. `size` None: endless, any index >= 0 is valid. `dropped` counts what was left out, and why."""

    name: str
    size: int | None
    get: Callable[[int], Prompt]
    dropped: dict[str, int] = field(default_factory=dict)

    def prompts(self) -> list[Prompt]:
        """All prompts of a finite data set, in index order."""
        if self.size is None:
            raise ValueError(f"data set {self.name} is endless; draw from it with PromptStream")
        return [self.get(i) for i in range(self.size)]


class PromptStream:
    """Draws prompts as a function of (seed, cursor) only.

    Finite data: each epoch is one permutation, shuffled by (seed, epoch). Endless data: indices seed * 2^40 + cursor,
    so streams of different seeds share nothing. The cursor counts prompts drawn since the start.
    """

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        if dataset.size == 0:
            raise ValueError(f"data set {dataset.name} is empty: nothing to draw")
        self.dataset, self.seed, self.cursor = dataset, seed, 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def _index(self, cursor: int) -> int:
        size = self.dataset.size
        if size is None:
            return self.seed * STREAM_STRIDE + cursor
        epoch, place = divmod(cursor, size)
        if epoch != self._epoch:
            self._epoch, self._order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(size),
            )
        return int(self._order[place])

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; moves the cursor."""
        drawn = [self.dataset.get(self._index(self.cursor + i)) for i in range(n)]
        self.cursor += n
        return drawn

    def state(self) -> dict[str, Any]:
        """What `restore` needs; JSON-able."""
        return {
            "dataset": self.dataset.name,
            "size": self.dataset.size,
            "seed": self.seed,
            "cursor": self.cursor,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; ValueError if it is of other data or another seed."""
        for key, value in self.state().items():
            if key != "cursor" and state.get(key) != value:
                raise ValueError(
                    f"the saved prompt stream has {key}={state.get(key)}, this run has {key}={value}: "
                    "resume with the data settings and seed the run was started with"
                )
        self.cursor = int(state["cursor"])


def build_dataset(
    data: Any, split: str, count_tokens: Callable[[str], int] | None = None
) -> Dataset:
    """The data set that a DataConfig (or a dict of its keys) describes, for split "train" or "heldout".

    `count_tokens` measures a rendered prompt; prompts over `max_prompt_tokens` are dropped and counted.
    """
    _check_split(split)
    get = (
        data.get
        if isinstance(data, dict)
        else lambda key, default=None: getattr(data, key, default)
    )
    kind = get("kind", "arithmetic")
    find_template(get("template", "short"))
    builders = {
        "arithmetic": _arithmetic_dataset,
        "reasoning_gym": _reasoning_gym_dataset,
        "files": _files_dataset,
    }
    if kind not in builders:
        raise ValueError(f"data.kind={kind}: expected one of {', '.join(builders)}")
    limit = get("max_prompt_tokens", 0)
    fits = (lambda p: count_tokens(p.text) <= limit) if count_tokens and limit else (lambda p: True)
    return builders[kind](get, split, fits)


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split={split}: expected one of {', '.join(SPLITS)}")


def _first_distinct(
    make: Callable[[int], Prompt],
    wanted: int,
    fits: Callable[[Prompt], bool],
    name: str,
    setting: str = "data.heldout_size",
) -> Dataset:
    """The first `wanted` prompts of `make(0), make(1), ...` that fit and are distinct, as a finite data set."""
    found: dict[str, Prompt] = {}
    dropped = {"too_long": 0, "duplicate": 0}
    for index in range(wanted * 20):
        if len(found) == wanted:
            break
        prompt = make(index)
        if not fits(prompt):
            dropped["too_long"] += 1
        elif prompt.prompt_id in found:
            dropped["duplicate"] += 1
        else:
            found[prompt.prompt_id] = prompt
    if len(found) < wanted:
        raise ValueError(
            f"{setting}={wanted}: {name} gave only {len(found)} usable distinct prompts "
            f"({dropped}); lower {setting} or raise data.max_prompt_tokens"
        )
    prompts = list(found.values())
    return Dataset(name, len(prompts), prompts.__getitem__, dropped)


def _arithmetic_dataset(get: Callable, split: str, fits: Callable[[Prompt], bool]) -> Dataset:
    terms, largest = list(get("terms", (2, 3, 4))), get("max_number", 99)
    seed, template = get("seed", 0), get("template", "short")
    name = f"arithmetic/{split}/terms={'-'.join(map(str, terms))}/max={largest}/seed={seed}"

    def make(index: int) -> Prompt:
        return arithmetic_prompt(index, seed, split, terms, largest, template)

    longest = make_prompt(
        "+".join([str(largest)] * max(terms)) + "=?", "", template, data_source="", task="math"
    )
    if not fits(longest):
        raise ValueError(
            f"data.max_prompt_tokens={get('max_prompt_tokens')}: the longest prompt of data.terms={terms} "
            f"and data.max_number={largest} does not fit; raise it or shorten data.template={template}"
        )
    if split == "heldout":
        return _first_distinct(make, get("heldout_size", 64), fits, name)
    size = get("size", 0)
    return (
        _first_distinct(make, size, fits, f"{name}/size={size}", "data.size")
        if size
        else Dataset(name, None, make)
    )


# reasoning-gym seeds the item i of a data set with seed + i, so data sets of near seeds share items. One data set of
# seed 0 is used and the index range is cut in two: train below GYM_TRAIN_ITEMS, held-out from there on.
GYM_TRAIN_ITEMS = 1 << 30


def _reasoning_gym_dataset(get: Callable, split: str, fits: Callable[[Prompt], bool]) -> Dataset:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name, template, seed = get("name", ""), get("template", "short"), get("seed", 0)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5) or sorted(DATASETS)[:8]
        raise ValueError(
            f"data.name={name or '(empty)'}: not a reasoning-gym data set; for example {', '.join(near)}"
        )
    options = dict(get("options", None) or {})
    source = reasoning_gym.create_dataset(
        name, **{**options, "seed": 0, "size": 2 * GYM_TRAIN_ITEMS}
    )

    def item(place: int) -> Prompt:
        entry = json.loads(json.dumps(source[place], default=str))
        return make_prompt(
            entry["question"],
            str(entry["answer"]),
            template,
            data_source=f"reasoning_gym/{name}",
            task="reasoning_gym",
            extra={"name": name, "entry": entry, "options": options},
        )

    start = GYM_TRAIN_ITEMS + int(stable_hash("gym", seed), 16) % (GYM_TRAIN_ITEMS // 2)
    heldout = _first_distinct(
        lambda i: item(start + i), get("heldout_size", 64), fits, f"reasoning_gym/{name}/heldout"
    )
    if split == "heldout":
        return heldout
    taken = {prompt.prompt_id for prompt in heldout.prompts()}
    train = Dataset(
        f"reasoning_gym/{name}/train/seed={seed}",
        None,
        lambda i: make(i),
        {"too_long": 0, "heldout": 0},
    )

    def make(index: int) -> Prompt:
        for attempt in range(1000):
            prompt = item(int(stable_hash("gym", seed, index, attempt), 16) % GYM_TRAIN_ITEMS)
            reason = "heldout" if prompt.prompt_id in taken else "" if fits(prompt) else "too_long"
            if not reason:
                return prompt
            train.dropped[reason] += 1
        raise ValueError(
            f"data.name={name}: 1000 draws gave no train prompt that fits and is not held out; lower "
            "data.heldout_size or raise data.max_prompt_tokens"
        )

    return train


def _files_dataset(get: Callable, split: str, fits: Callable[[Prompt], bool]) -> Dataset:
    from actors.data.files import load_files

    path, heldout_path = get("path", ""), get("heldout_path", "")
    if not path:
        raise ValueError(
            "data.path is empty: data=files needs a JSON-lines file, a Parquet file or a data set folder"
        )
    keys = {
        "question_key": get("question_key", "question"),
        "answer_key": get("answer_key", "answer"),
        "template": get("template", "short"),
    }
    dropped = {"too_long": 0, "duplicate": 0, "heldout": 0}
    rows = _usable(load_files(path, **keys), fits, dropped)
    if heldout_path:
        held = _usable(
            load_files(heldout_path, **keys), fits, dropped if split == "heldout" else dict(dropped)
        )
    else:  # no file of its own: hold out the rows whose hashes are smallest, whatever their order in the file
        wanted = get("heldout_size", 64)
        if wanted >= len(rows):
            raise ValueError(
                f"data.heldout_size={wanted}: {path} has only {len(rows)} usable prompts and some must "
                "stay for training; lower it or give data.heldout_path"
            )
        held = sorted(rows, key=lambda p: stable_hash("heldout", get("seed", 0), p.prompt_id))[
            :wanted
        ]
    taken = {prompt.question for prompt in held}
    train = [prompt for prompt in rows if prompt.question not in taken]
    if split == "train":
        dropped["heldout"] = len(rows) - len(train)
    chosen = held if split == "heldout" else train
    if not chosen:
        raise ValueError(
            f"data.path={path}: no {split} prompt left ({dropped}); raise data.max_prompt_tokens or "
            "check that data.heldout_path does not hold the same questions"
        )
    name = f"files/{path}/{split}/{stable_hash([p.prompt_id for p in chosen])}"
    return Dataset(name, len(chosen), chosen.__getitem__, dropped)


def _usable(
    prompts: list[Prompt], fits: Callable[[Prompt], bool], dropped: dict[str, int]
) -> list[Prompt]:
    """Prompts that fit, without repeats, in order; what is left out is added to `dropped`."""
    kept: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.prompt_id in kept:
            dropped["duplicate"] += 1
        elif not fits(prompt):
            dropped["too_long"] += 1
        else:
            kept[prompt.prompt_id] = prompt
    return list(kept.values())
