"""A data set as a function from an index to a prompt, and the order in which prompts are drawn.

Both are functions of plain integers, so a run resumed at a cursor draws exactly what an
uninterrupted run would have drawn. Pure: standard library and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.data.prompt import Prompt

SPLITS = ("train", "heldout")
Get = Callable[..., Any]  # get(name, default): the value of the setting data.NAME
Fits = Callable[[Prompt], bool]  # whether a prompt is within data.max_prompt_tokens
# An endless data set gives each stream seed a range of this many indices of its own.
STREAM_STRIDE = 1 << 40


@dataclass
class Dataset:
    """Prompts by index.

    `size` is None for an endless data set, in which any index >= 0 is valid. `dropped` counts the
    prompts that were left out, by reason.
    """

    name: str
    size: int | None
    get: Callable[[int], Prompt]
    dropped: dict[str, int] = field(default_factory=dict)

    def prompts(self) -> list[Prompt]:
        """All prompts of a finite data set, in index order. ValueError for an endless one."""
        if self.size is None:
            raise ValueError(f"data set {self.name} is endless; draw from it with PromptStream")
        return [self.get(i) for i in range(self.size)]


class PromptStream:
    """Draws prompts as a function of (seed, cursor) only.

    Finite data: each epoch is one permutation, shuffled by (seed, epoch). Endless data: the indices
    are seed * 2^40 + cursor, so streams of different seeds share nothing. The cursor counts the
    prompts drawn since the start.
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
        epoch, position = divmod(cursor, size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(size)
        return int(self._order[position])

    def next(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts, which moves the cursor by `n`."""
        drawn = [self.dataset.get(self._index(self.cursor + i)) for i in range(n)]
        self.cursor += n
        return drawn

    def state(self) -> dict[str, Any]:
        """The position of the stream as JSON-able values, for `restore`."""
        return {
            "dataset": self.dataset.name,
            "size": self.dataset.size,
            "seed": self.seed,
            "cursor": self.cursor,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises ValueError if it is of other data or another seed."""
        for key, value in self.state().items():
            if key != "cursor" and state.get(key) != value:
                raise ValueError(
                    f"the saved prompt stream has {key}={state.get(key)}, this run has "
                    f"{key}={value}: resume with the data settings and seed the run was started "
                    "with"
                )
        self.cursor = int(state["cursor"])


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is "train" or "heldout"."""
    if split not in SPLITS:
        raise ValueError(f"split={split}: expected one of {', '.join(SPLITS)}")


def first_distinct(
    make: Callable[[int], Prompt],
    size: int,
    fits: Fits,
    name: str,
    setting: str = "data.heldout_size",
) -> Dataset:
    """A finite data set of the first `size` distinct prompts of make(0), make(1), ... that fit.

    Raises ValueError naming `setting` when 20 * size indices do not give enough of them.
    """
    chosen: dict[str, Prompt] = {}
    dropped = {"too_long": 0, "duplicate": 0}
    for index in range(size * 20):
        if len(chosen) == size:
            break
        prompt = make(index)
        if not fits(prompt):
            dropped["too_long"] += 1
        elif prompt.prompt_id in chosen:
            dropped["duplicate"] += 1
        else:
            chosen[prompt.prompt_id] = prompt
    if len(chosen) < size:
        raise ValueError(
            f"{setting}={size}: {name} gave only {len(chosen)} usable distinct prompts "
            f"({dropped}); lower {setting} or raise data.max_prompt_tokens"
        )
    prompts = list(chosen.values())
    return Dataset(name, len(prompts), prompts.__getitem__, dropped)
