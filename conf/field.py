"""How one setting is declared: its default, its meaning, and the values it may have.

Imports the standard library alone, because everything else imports this.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

MISSING = "???"  # OmegaConf's mark of a value that the user must give


class ConfigError(ValueError):
    """A setting is wrong. The message names the key, its value, what was expected and what to do.

    `key` is dotted, such as "rollout.group_size". `cure` is a whole sentence, or empty.
    """

    def __init__(self, key: str, value: Any, expected: str, cure: str = "") -> None:
        self.key = key
        cure = f" {cure}" if cure else ""
        super().__init__(f"{key}={value}: {expected}.{cure}")


@dataclass(frozen=True)
class Bounds:
    """The interval of a number. `low` and `high` belong to it, `above` and `below` do not."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def violation(self, value: float) -> str:
        """What was expected of `value`, for a message; empty where the value is allowed.

        A value that is not finite is never allowed where there is a bound.
        """
        if self == Bounds():
            return ""
        finite = math.isfinite(value)
        if self.low is not None and (value < self.low or not finite):
            return f"expected at least {self.low}"
        if self.above is not None and (value <= self.above or not finite):
            return f"expected more than {self.above}"
        if self.high is not None and (value > self.high or not finite):
            return f"expected a number in {self}, so at most {self.high}"
        if self.below is not None and (value >= self.below or not finite):
            return f"expected a number in {self}, so below {self.below}"
        return ""

    def __str__(self) -> str:
        """`>= 0`, `> 0`, or an interval such as `(0, 1]`."""
        floor = self.low if self.above is None else self.above
        ceiling = self.high if self.below is None else self.below
        if ceiling is None:
            return "" if floor is None else f"{'>=' if self.above is None else '>'} {floor}"
        if floor is None:
            return f"{'<=' if self.below is None else '<'} {ceiling}"
        opening, closing = "[" if self.above is None else "(", "]" if self.below is None else ")"
        return f"{opening}{floor}, {ceiling}{closing}"


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a settings dataclass.

    `help` says in one or two sentences what the setting does, and its unit. `choices` are all
    allowed values, where there is a list of them. `low`, `above`, `high` and `below` are `Bounds`.
    A list or dict as default is copied for every instance.
    """
    metadata = {"help": help, "choices": choices, "bounds": Bounds(low, above, high, below)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)
