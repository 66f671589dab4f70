"""The data set that the settings describe.

To add a data set, write one file beside this one with a function of type `Builder`, and name it in
BUILDERS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors.data.arithmetic import arithmetic_dataset
from actors.data.files import files_dataset
from actors.data.prompt import Prompt, find_template
from actors.data.reasoning_gym import reasoning_gym_dataset
from actors.data.stream import Dataset, Fits, Get, check_split

# (get, split, fits) -> Dataset. The builder leaves out prompts for which `fits` is false, counts
# them in Dataset.dropped, and raises ValueError for settings it cannot satisfy.
Builder = Callable[[Get, str, Fits], Dataset]

BUILDERS: dict[str, Builder] = {  # by data.kind
    "arithmetic": arithmetic_dataset,
    "reasoning_gym": reasoning_gym_dataset,
    "files": files_dataset,
}


def build_dataset(
    data: Any, split: str, count_tokens: Callable[[str], int] | None = None
) -> Dataset:
    """The data set that a DataConfig (or a dict of its keys) describes.

    `split` is "train" or "heldout". `count_tokens` gives the number of tokens of a rendered prompt;
    prompts over data.max_prompt_tokens are dropped and counted. Without it, or with a limit of 0,
    every prompt fits. Raises ValueError naming the setting that is wrong.
    """
    check_split(split)

    def get(key: str, default: Any = None) -> Any:
        return data.get(key, default) if isinstance(data, dict) else getattr(data, key, default)

    def fits(prompt: Prompt) -> bool:
        return count_tokens is None or not limit or count_tokens(prompt.text) <= limit

    limit = get("max_prompt_tokens", 0)
    kind = get("kind", "arithmetic")
    find_template(get("template", "short"))
    if kind not in BUILDERS:
        raise ValueError(f"data.kind={kind}: expected one of {', '.join(BUILDERS)}")
    return BUILDERS[kind](get, split, fits)
