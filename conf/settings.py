"""Reads the declarations of conf/schema.py: keys, types, choices, bounds, and the checks of them.

A key is dotted, such as "rollout.group_size". A setting is the value at a key; a section is a
dataclass of settings. Below a setting whose type is a dict, such as reward.rules, any key is
allowed. Imports nothing heavier than the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from conf.field import Bounds, ConfigError
from conf.schema import Config


def get(cfg: Any, key: str) -> Any:
    """The value of `cfg`, a Config, at a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


@cache
def declarations() -> dict[str, Field[Any]]:
    """The dataclass field of every setting, by key, in the order of the schema."""

    def of_section(section: type, prefix: str) -> dict[str, Field[Any]]:
        by_key: dict[str, Field[Any]] = {}
        for declared in fields(section):
            kind = types(section)[declared.name]
            key = prefix + declared.name
            by_key |= of_section(kind, f"{key}.") if is_dataclass(kind) else {key: declared}
        return by_key

    return of_section(Config, "")


def keys() -> list[str]:
    """All keys of the schema."""
    return list(declarations())


@cache
def types(section: type) -> dict[str, Any]:
    """Type of each field of a section, such as `list[int]`."""
    return get_type_hints(section)


def type_of(key: str) -> Any:
    """Type of the setting, section or dict entry at `key`. Raises KeyError for an unknown key."""
    kind: Any = Config
    for part in key.split("."):
        kind = types(kind)[part] if is_dataclass(kind) else entry_type(kind)
    return kind


def entry_type(kind: Any) -> Any:
    """Type of the values of a dict type. Raises KeyError for another type."""
    if get_origin(kind) is not dict:
        raise KeyError(f"{kind} has no entries")
    return get_args(kind)[1]


def choices(key: str) -> tuple[Any, ...]:
    """All values that the setting at `key` may have; empty where there is no such list."""
    return declarations()[key].metadata["choices"]


def bounds(key: str) -> Bounds:
    """The interval of the number at `key`."""
    return declarations()[key].metadata["bounds"]


def check_each(cfg: Config) -> None:
    """Raise ConfigError on the first setting that is not among its choices or within its bounds."""
    for key in keys():
        if choices(key) and get(cfg, key) not in choices(key):
            allowed = ", ".join(map(str, choices(key)))
            raise ConfigError(key, get(cfg, key), f"expected one of {allowed}")
    for key in keys():
        value = get(cfg, key)
        if value is not None:  # None: an optional setting that is off
            if violation := bounds(key).violation(value) if bounds(key) != Bounds() else "":
                raise ConfigError(key, value, violation)


def first_unknown(values: Mapping[Any, Any], section: type = Config, prefix: str = "") -> str:
    """The first key of nested `values` that `section` does not have; empty where all are known."""
    for name, value in values.items():
        if name not in types(section):
            return f"{prefix}{name}"
        kind = types(section)[name]
        if is_dataclass(kind) and isinstance(value, Mapping):
            if unknown := first_unknown(value, kind, f"{prefix}{name}."):
                return unknown
    return ""


def nearest(key: str) -> str:
    """The known key that resembles `key` most; empty where none does.

    A key of the same section with a similar last word comes before similar keys elsewhere.
    """
    section, _, name = key.rpartition(".")
    names = {k.rpartition(".")[2]: k for k in keys() if k.rpartition(".")[0] == section}
    for similar in difflib.get_close_matches(name, names, 1, 0.4):
        return names[similar]
    return next(iter(difflib.get_close_matches(key, keys(), 1, 0.6)), "")


def unknown_setting(key: str, value: Any) -> ConfigError:
    """The error of a key that the schema does not have."""
    similar = nearest(key)
    cure = f"Did you mean {similar}?" if similar else "Settings: docs/configuration.md."
    return ConfigError(key, value, "unknown setting", cure)
