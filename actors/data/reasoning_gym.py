"""The data set `reasoning_gym`: any data set of the reasoning-gym package, by name.

reasoning-gym seeds item i of a data set with seed + i, so data sets of near seeds share items. This
module therefore uses one data set, of seed 0, and cuts its index range in two: training items lie
below TRAIN_ITEMS, held-out items from there on.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

from actors.data.prompt import Prompt, make_prompt, stable_hash
from actors.data.stream import Dataset, Fits, Get, first_distinct

TRAIN_ITEMS = 1 << 30
ATTEMPTS = 1000  # draws for one training prompt that fits and is not held out


def reasoning_gym_dataset(get: Get, split: str, fits: Fits) -> Dataset:
    """The data set data.name with data.options: endless for training, data.heldout_size held out.

    Small data sets repeat their questions, so training skips every held-out question. Raises
    ValueError for an unknown name, with names close to it.
    """
    name, seed = get("name", ""), get("seed", 0)
    options = dict(get("options", None) or {})
    item = _items(name, options, get("template", "short"))
    start = TRAIN_ITEMS + int(stable_hash("gym", seed), 16) % (TRAIN_ITEMS // 2)
    heldout = first_distinct(
        lambda i: item(start + i), get("heldout_size", 64), fits, f"reasoning_gym/{name}/heldout"
    )
    if split == "heldout":
        return heldout
    heldout_ids = {prompt.prompt_id for prompt in heldout.prompts()}
    dropped = {"too_long": 0, "heldout": 0}

    def make(index: int) -> Prompt:
        for attempt in range(ATTEMPTS):
            prompt = item(int(stable_hash("gym", seed, index, attempt), 16) % TRAIN_ITEMS)
            if prompt.prompt_id in heldout_ids:
                dropped["heldout"] += 1
            elif not fits(prompt):
                dropped["too_long"] += 1
            else:
                return prompt
        raise ValueError(
            f"data.name={name}: {ATTEMPTS} draws gave no train prompt that fits and is not held "
            "out; lower data.heldout_size or raise data.max_prompt_tokens"
        )

    return Dataset(f"reasoning_gym/{name}/train/seed={seed}", None, make, dropped)


def _items(name: str, options: dict[str, Any], template: str) -> Callable[[int], Prompt]:
    """The function from an index of the package's data set `name` to a prompt."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5) or sorted(DATASETS)[:8]
        raise ValueError(
            f"data.name={name or '(empty)'}: not a reasoning-gym data set; for example "
            f"{', '.join(near)}"
        )
    source = reasoning_gym.create_dataset(name, **{**options, "seed": 0, "size": 2 * TRAIN_ITEMS})

    def item(index: int) -> Prompt:
        entry = json.loads(json.dumps(source[index], default=str))
        return make_prompt(
            entry["question"],
            str(entry["answer"]),
            template,
            data_source=f"reasoning_gym/{name}",
            task="reasoning_gym",
            extra={"name": name, "entry": entry, "options": options},
        )

    return item
