"""Where a run's actors go: one Ray placement group, a bundle an actor, reserved as a whole before any of them starts.

What is needed and what is missing is worked out here without Ray, which only `reserve` and what follows it import.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.roster import ROLES as ALL_ROLES
from cluster.roster import UNPLACED, roster

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")  # Ray's
ROLES = tuple(name for name in ALL_ROLES if name not in UNPLACED)
NODES_SHOWN = 6
_reserved: dict[str, Any] = {"group": None, "bundles": {}}  # of the run in this process


class PlacementError(ValueError):
    """The cluster has no room for the run; the message says what is needed, what there is, and what to do."""


@dataclass(frozen=True)
class Bundle:
    """What one actor reserves: Ray's resources by name, zeros left out."""

    role: str
    index: int
    resources: dict[str, float]


def bundles(cfg: Any) -> list[Bundle]:
    """One for each actor of the run that reserves something. `cfg`: conf.schema.Config."""
    wanted = []
    for role in roster(cfg):
        named = {"CPU": role.cpus, "GPU": role.gpus} | dict(
            cfg.cluster.resources.get(role.name, {})
        )
        resources = {name: float(value) for name, value in named.items() if value}
        wanted += [Bundle(role.name, i, dict(resources)) for i in range(role.count) if resources]
    return wanted


def check(resources: Mapping[str, Any]) -> None:
    """Raises ConfigError where cluster.resources names no role, or no positive amounts."""
    from conf.schema import ConfigError

    for role, named in resources.items():
        if (
            role not in ROLES
            or not isinstance(named, dict)
            or {"CPU", "GPU"} & set(named)
            or not all(isinstance(v, int | float) and v > 0 for v in named.values())
        ):
            raise ConfigError(
                "cluster.resources",
                f"{{{role}: {named}}}",
                f"expected a role ({', '.join(ROLES)}) and "
                "amounts above 0 of resources that nodes were started with: {generator: {big: 1}}",
                "CPUs and GPUs are set by ROLE.cpus and ROLE.gpus.",
            )


def total(amounts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum by name, CPU and GPU first."""
    summed: Counter[str] = Counter()
    for each in amounts:
        summed.update(each)
    return {
        name: summed[name] for name in sorted(summed, key=lambda n: (n not in ("CPU", "GPU"), n))
    }


def shortage(
    wanted: Sequence[Bundle],
    nodes: Sequence[Mapping[str, float]],
    free: Mapping[str, float],
    strategy: str = "PACK",
) -> str:
    """Need and have. `nodes`: all that each has; `free`: what is free of all of it together."""
    need = total([b.resources for b in wanted])
    parts = ", ".join(f"{n} x {role} ({show(resources)})" for role, resources, n in _alike(wanted))
    lacking = {
        name: value - free.get(name, 0.0)
        for name, value in need.items()
        if free.get(name, 0.0) + 1e-9 < value
    }
    why = (
        f"short of {show(lacking)}"
        if lacking
        else (f"that much is free, but not where the parts and cluster.strategy={strategy} want it")
    )
    each = [show({name: node.get(name, 0.0) for name in need}) for node in nodes[:NODES_SHOWN]]
    each += [f"{len(nodes) - NODES_SHOWN} more"] * (len(nodes) > NODES_SHOWN)
    left = show({name: free.get(name, 0.0) for name in need})
    return f"needs {show(need)}: {parts}. Free are {left}, on nodes that have {' | '.join(each) or 'nothing'}: {why}."


def show(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in resources.items())


def _alike(wanted: Sequence[Bundle]) -> list[tuple[str, dict[str, float], int]]:
    """(role, resources of one, how many)"""
    return [
        (role, next(b.resources for b in wanted if b.role == role), n)
        for role, n in Counter(b.role for b in wanted).items()
    ]


# ---- with Ray ------------------------------------------------------------------------------------------------


def reserve(cfg: Any) -> str:
    """Reserve every bundle at once, waiting cluster.wait_s for room; returns where they are where there are several
    nodes, else "". Raises PlacementError, with nothing reserved and no actor started."""
    import ray

    wanted = bundles(cfg)
    group = ray.util.placement_group([b.resources for b in wanted], strategy=cfg.cluster.strategy)
    deadline = time.monotonic() + cfg.cluster.wait_s
    told = False
    while not group.wait(timeout_seconds=max(0.1, min(5.0, deadline - time.monotonic()))):
        missing = shortage(
            wanted,
            [n["Resources"] for n in ray.nodes() if n["Alive"]],
            ray.available_resources(),
            cfg.cluster.strategy,
        )
        if time.monotonic() >= deadline:
            ray.util.remove_placement_group(group)
            raise PlacementError(
                f"no room on the cluster within cluster.wait_s={cfg.cluster.wait_s:g} s: the run {missing} Lower "
                "generator.count, learner.ranks or their cpus and gpus, add nodes, or raise cluster.wait_s where "
                "an autoscaler brings some."
            )
        if not told:
            print(
                f"volley: waiting for room, at most {cfg.cluster.wait_s:g} s: the run {missing}",
                flush=True,
            )
            told = True
    _reserved.update(group=group, bundles={(b.role, b.index): i for i, b in enumerate(wanted)})
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    if len(names) < 2:
        return ""
    places: dict[str, list[str]] = {}
    for i, node in sorted(ray.util.placement_group_table(group)["bundles_to_node_id"].items()):
        places.setdefault(node, []).append(f"{wanted[i].role}-{wanted[i].index}")
    return "; ".join(
        f"{names[node]} ({node[:6]}): {', '.join(roles)}" for node, roles in places.items()
    )


def options(cfg: Any, role: str, index: int) -> dict[str, Any]:
    """For actor.options(): what this actor reserves, and its place where one is reserved for it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    named = dict(
        next((b.resources for b in bundles(cfg) if (b.role, b.index) == (role, index)), {})
    )
    found: dict[str, Any] = {
        "num_cpus": named.pop("CPU", 0),
        "num_gpus": named.pop("GPU", 0),
        "resources": named,
    }
    place = _reserved["bundles"].get((role, index))
    if place is not None:
        found["scheduling_strategy"] = PlacementGroupSchedulingStrategy(_reserved["group"], place)
    return found


def whole() -> bool:
    """Whether every place reserved is on a node that is alive. (Ray moves those of a dead node where there is room.)"""
    import ray

    group = _reserved["group"]
    return group is None or ray.util.placement_group_table(group)["state"] == "CREATED"
