"""Checks the overrides of a command line against the schema, before Hydra composes anything.

An override is `key=value`, `+key=value`, `++key=value` or `~key`. Its key is a group, which is a
folder of conf/ whose files are the choices, or a setting of conf/schema.py. Keys of Hydra itself
(`hydra.*`) are left to Hydra.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from conf.field import ConfigError
from conf.schema import Config
from conf.settings import first_unknown, type_of, unknown_setting

CONF = Path(__file__).resolve().parent
CHOICE_SWEEPS = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP)  # a=1,2 and a=choice(1,2)
# Types as OmegaConf calls them.
TYPE_NAMES = {int: "Integer", float: "Float", bool: "bool", str: "String"}


def parse(arguments: list[str]) -> list[Override]:
    """The overrides of a command line. Raises ConfigError for an argument that is none."""
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            overrides += OverridesParser.create().parse_overrides([argument])
        except OverrideParseException as error:
            raise ConfigError(key, value, "expected key=value") from error
        if not overrides[-1].key_or_group:
            raise ConfigError(key, value, "expected key=value")
    return overrides


def check(overrides: list[Override]) -> None:
    """Raise ConfigError on the first override that the schema or the folders of conf/ refuse."""
    for override in overrides:
        key = override.key_or_group
        if key.replace("/", ".").partition(".")[0] == "hydra":
            continue
        written = (override.input_line or "").partition("=")[2]
        is_group = (CONF / key).is_dir()
        if not is_group and (override.package is not None or first_unknown(_nested(key, None))):
            raise unknown_setting(
                (override.input_line or "").lstrip("+~").partition("=")[0], written
            )
        for value in () if override.is_delete() else _values(override):
            if is_group:
                _check_choice(key, value, written)
            else:
                _check_value(key, value, written)


def group_choices(group: str) -> list[str]:
    """The files of a group without their suffix, such as "grpo" and "recipe/grpo_r1_zero"."""
    folder = CONF / group
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def type_error(key: str, value: Any, written: Any) -> ConfigError:
    """The error of a `value` that does not have the type of the setting `key`.

    `written` is the value as the message shows it.
    """
    kind = type_of(key)
    if value is None:
        return ConfigError(key, written, "a value must be given")
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is list and isinstance(value, list):
        kind = get_args(kind)[0]
    if kind in TYPE_NAMES:
        return ConfigError(key, written, f"expected a value of type {TYPE_NAMES[kind]}")
    if get_origin(kind) is list:
        return ConfigError(key, written, "expected a list, such as [1, 2]")
    return ConfigError(key, written, "expected a mapping, such as {key: value}")


def _values(override: Override) -> list[Any]:
    """The value of an override, or each value of a sweep that lists them; no values of a range."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type not in CHOICE_SWEEPS:
        return []
    parser = OverridesParser.create()
    return [parser.parse_override(f"x={text}").value() for text in override.sweep_string_iterator()]


def _check_choice(group: str, value: Any, written: str) -> None:
    """Raise ConfigError where `value`, a name or a list of names, is no file of the group."""
    choices = group_choices(group)
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and "${" not in name and name not in choices:
            raise ConfigError(group, written, f"expected one of {', '.join(choices)}")


def _check_value(key: str, value: Any, written: str) -> None:
    """Raise ConfigError where `value` has keys that the schema lacks, or not the setting's type."""
    nested = _nested(key, value)
    if unknown := first_unknown(nested):
        raise unknown_setting(unknown, _entry(nested, unknown))
    try:
        OmegaConf.merge(_typed_defaults(), nested)
    except ValidationError as error:
        wrong = (error.full_key or key).partition("[")[0]
        wrong_value = _entry(nested, wrong)
        raise type_error(wrong, wrong_value, written if wrong == key else wrong_value) from error


def _nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for the key "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _entry(nested: Any, key: str) -> Any:
    """The value at a dotted key of nested mappings."""
    for name in key.split("."):
        nested = nested[name]
    return nested


@cache
def _typed_defaults() -> Any:
    """The schema as OmegaConf reads it, which converts and refuses values by type."""
    return OmegaConf.structured(Config)
