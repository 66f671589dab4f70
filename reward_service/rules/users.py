"""The user's own reward functions, in the interfaces of verl, TRL and OpenRLHF.

They run in the worker processes. An item on which a function hangs or crashes gets the status
"timeout" or "error", never a reward of zero.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reward_service.rules.item import RewardItem, Rule

STYLES = {
    "verl": "compute_score(data_source, solution_str, ground_truth, extra_info)",
    "trl": "f(prompts, completions, **columns)",
    "remote": "POST {query, prompts, labels}",
}


def load_rules(custom: Mapping[str, Mapping[str, Any]], timeout_s: float) -> dict[str, Rule]:
    """The rules of options.custom, which maps each name to its settings.

    The settings are style (verl, trl or remote), path, function, url, kwargs and conversational.
    Raises ValueError or FileNotFoundError naming the setting at fault.
    """
    rules: dict[str, Rule] = {}
    for name, settings in custom.items():
        where, style = f"reward.options.custom.{name}", settings.get("style")
        unknown = set(settings) - {"style", "path", "function", "url", "kwargs", "conversational"}
        if style not in STYLES or unknown:
            raise ValueError(
                f"{where}: style={style!r}, unknown keys {sorted(unknown)}; styles: {STYLES}"
            )
        if style == "remote":
            rules[str(name)] = _remote(where, settings, timeout_s)
        else:
            function = _load(where, settings, "compute_score" if style == "verl" else str(name))
            rules[str(name)] = (_verl if style == "verl" else _trl)(str(name), function, settings)
    return rules


def _load(where: str, settings: Mapping[str, Any], default: str) -> Callable[..., Any]:
    """The function that the settings name, from the Python file at their path."""
    path = Path(str(settings.get("path", ""))).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"{where}.path={str(path)!r} is not a file; expected a Python file with the function"
        )
    spec = importlib.util.spec_from_file_location(f"volley_user_{abs(hash(str(path)))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = str(settings.get("function", default))
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{where}.function={name!r} is not a function of {path}")
    return function


def _finish(value: Any) -> Any:
    """The result of a call; the result of an async function is awaited."""
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value


def _number(name: str, value: Any, parts: dict[str, float]) -> float:
    """The value as a float. Of a dict it is the entry `score`.

    The other numbers of the dict are added to `parts` as "rule/key". Raises ValueError or TypeError
    for a value without a number.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(
                f"rule {name!r} returned a dict without 'score': {sorted(map(str, value))}"
            )
        for key, other in value.items():
            if key != "score" and isinstance(other, int | float) and math.isfinite(other):
                parts[f"{name}/{key}"] = float(other)
        value = value["score"]
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(
            f"rule {name!r} returned {value!r}; expected a number or a dict with 'score'"
        )
    return float(value)


def _truth(gold: str) -> Any:
    """The ground truth in the form of the data set: lists and dicts are stored as JSON text."""
    if gold[:1] in ("{", "["):
        try:
            return json.loads(gold)
        except ValueError:
            return gold
    return gold


def _verl(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Rule:
    """The rule that calls a function with the interface of verl's compute_score."""
    kwargs = dict(settings.get("kwargs") or {})

    def rule(item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]) -> float:
        value = function(
            data_source=item.data_source,
            solution_str=item.response,
            ground_truth=_truth(item.gold),
            extra_info=dict(item.extra),
            **kwargs,
        )
        return _number(name, _finish(value), parts)

    return rule


def _trl(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Rule:
    """The rule that calls a TRL reward function with one completion; None: does not apply."""
    chat, kwargs = bool(settings.get("conversational", False)), dict(settings.get("kwargs") or {})

    def rule(item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]) -> float | None:
        truth = _truth(item.gold)
        columns = {
            "answer": truth,
            "solution": truth,
            "ground_truth": truth,
            "data_source": item.data_source,
            "task": item.task,
            **item.extra,
        }
        prompt: Any = [{"role": "user", "content": item.prompt}] if chat else item.prompt
        completion: Any = (
            [{"role": "assistant", "content": item.response}] if chat else item.response
        )
        values = _finish(
            function(
                prompts=[prompt],
                completions=[completion],
                **{key: [value] for key, value in columns.items()},
                **kwargs,
            )
        )
        values = values if isinstance(values, list | tuple) else list(values)
        if len(values) != 1:
            raise ValueError(f"rule {name!r} returned {len(values)} rewards for 1 completion")
        return None if values[0] is None else _number(name, values[0], parts)

    return rule


def _remote(where: str, settings: Mapping[str, Any], timeout_s: float) -> Rule:
    """The rule that posts the item to a remote reward model in the interface of OpenRLHF."""
    url = str(settings.get("url", ""))
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{where}.url={url!r}: expected an http(s) address")

    def rule(item: RewardItem, options: Mapping[str, Any], parts: dict[str, float]) -> float:
        body = {
            "query": [item.prompt + item.response],
            "prompts": [item.prompt],
            "labels": [_truth(item.gold)],
        }
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s * 0.9) as answer:
            reply = json.load(answer)
        rewards = reply.get("rewards", reply.get("reward")) if isinstance(reply, Mapping) else reply
        rewards = rewards if isinstance(rewards, list) else [rewards]
        if len(rewards) != 1:
            raise ValueError(f"{where}: {len(rewards)} rewards for 1 query")
        return _number(where, rewards[0], parts)

    return rule
