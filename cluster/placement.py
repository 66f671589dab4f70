"""Where a run's actors go: one Ray placement group with a bundle for each actor.

The whole group is reserved before the first actor starts.

Only `reserve` and the functions below it import Ray. What a run needs and what a cluster lacks is
worked out without it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.roster import PLACED, roster
from conf.schema import Config, ConfigError

NODES_SHOWN = 6  # in a message
ROUNDING = 1e-9  # of Ray's fractional resources
# The placement group of the run in this process, and the place in it of each (role, index).
_reserved: dict[str, Any] = {"group": None, "places": {}}


class PlacementError(ValueError):
    """The cluster has no room for the run. The message says what is needed, what there is, and what
    to do."""


@dataclass(frozen=True)
class Bundle:
    """What the actor number `index` of a role reserves: Ray's resources by name, none of them 0."""

    role: str
    index: int
    resources: dict[str, float]


def bundles(cfg: Config) -> list[Bundle]:
    """Return one bundle for each actor of the run that reserves something."""
    reserving = []
    for role in roster(cfg):
        custom = cfg.cluster.resources.get(role.name, {})
        amounts = {"CPU": role.cpus, "GPU": role.gpus, **custom}
        resources = {name: float(value) for name, value in amounts.items() if value}
        if resources:
            reserving += [Bundle(role.name, i, dict(resources)) for i in range(role.count)]
    return reserving


def check(resources: Mapping[str, Any]) -> None:
    """Check the setting cluster.resources: Ray's resources by role.

    Raises ConfigError if a key is no role, or if an amount is not a positive number.
    """
    for role, amounts in resources.items():
        if (
            role not in PLACED
            or not isinstance(amounts, dict)
            or {"CPU", "GPU"} & set(amounts)
            or not all(isinstance(v, int | float) and v > 0 for v in amounts.values())
        ):
            raise ConfigError(
                "cluster.resources",
                f"{{{role}: {amounts}}}",
                f"expected a role ({', '.join(PLACED)}) and "
                "amounts above 0 of resources that nodes were started with: {generator: {big: 1}}",
                "CPUs and GPUs are set by ROLE.cpus and ROLE.gpus.",
            )


def total(amounts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of resources by name, with CPU and GPU first."""
    summed: Counter[str] = Counter()
    for each in amounts:
        summed.update(each)
    names = sorted(summed, key=lambda name: (name not in ("CPU", "GPU"), name))
    return {name: summed[name] for name in names}


def lacking(need: Mapping[str, float], free: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each resource falls short, for those that do."""
    return {
        name: value - free.get(name, 0.0)
        for name, value in need.items()
        if free.get(name, 0.0) + ROUNDING < value
    }


def shortage(
    needed: Sequence[Bundle],
    nodes: Sequence[Mapping[str, float]],
    free: Mapping[str, float],
    strategy: str = "PACK",
) -> str:
    """Return a sentence that says what a run needs and what the cluster has.

    nodes: all resources of each node, in use or not. free: the free resources of all nodes
    together. strategy: the setting cluster.strategy.
    """
    need = total([b.resources for b in needed])
    counts = Counter(b.role for b in needed)
    resources = {b.role: b.resources for b in needed}
    parts = ", ".join(f"{n} x {role} ({show(resources[role])})" for role, n in counts.items())
    short = lacking(need, free)
    if short:
        why = f"short of {show(short)}"
    else:
        why = f"that much is free, but not where the parts and cluster.strategy={strategy} want it"
    on_nodes = [show({name: node.get(name, 0.0) for name in need}) for node in nodes[:NODES_SHOWN]]
    if len(nodes) > NODES_SHOWN:
        on_nodes.append(f"{len(nodes) - NODES_SHOWN} more")
    return (
        f"needs {show(need)}: {parts}. Free are {show({n: free.get(n, 0.0) for n in need})}, on "
        f"nodes that have {' | '.join(on_nodes) or 'nothing'}: {why}."
    )


def show(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as "CPU 2, GPU 0.5"."""
    return ", ".join(f"{name} {value:g}" for name, value in resources.items())


# ---- with Ray ------------------------------------------------------------------------------------


def reserve(cfg: Config) -> str:
    """Reserve all bundles at once, and wait at most cluster.wait_s for room.

    Returns which actors go to which node if the cluster has several nodes, else "". Raises
    PlacementError if there is no room; nothing is reserved then and no actor was started.
    """
    import ray

    needed = bundles(cfg)
    group = ray.util.placement_group([b.resources for b in needed], strategy=cfg.cluster.strategy)
    wait_s = cfg.cluster.wait_s
    deadline = time.monotonic() + wait_s
    announced = False
    while not group.wait(timeout_seconds=max(0.1, min(5.0, deadline - time.monotonic()))):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        message = shortage(needed, nodes, ray.available_resources(), cfg.cluster.strategy)
        if time.monotonic() >= deadline:
            ray.util.remove_placement_group(group)
            raise PlacementError(
                f"no room on the cluster within cluster.wait_s={wait_s:g} s: the run {message} "
                "Lower generator.count, learner.ranks or their cpus and gpus, add nodes, or raise "
                "cluster.wait_s where an autoscaler brings some."
            )
        if not announced:
            print(f"volley: waiting for room, at most {wait_s:g} s: the run {message}", flush=True)
            announced = True
    _reserved.update(group=group, places={(b.role, b.index): i for i, b in enumerate(needed)})
    return _actors_by_node(group, needed)


def _actors_by_node(group: Any, needed: Sequence[Bundle]) -> str:
    """Return "ADDRESS (ID): ROLE-INDEX, ...; ..." if the cluster has several nodes, else ""."""
    import ray

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    if len(addresses) < 2:
        return ""
    actors: dict[str, list[str]] = {}
    for i, node in sorted(ray.util.placement_group_table(group)["bundles_to_node_id"].items()):
        actors.setdefault(node, []).append(f"{needed[i].role}-{needed[i].index}")
    return "; ".join(
        f"{addresses[node]} ({node[:6]}): {', '.join(names)}" for node, names in actors.items()
    )


def options(cfg: Config, role: str, index: int) -> dict[str, Any]:
    """Return the arguments of Ray's actor.options() for an actor of the run.

    They hold the resources that it reserves, and its place in the placement group if there is one.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    own = (b.resources for b in bundles(cfg) if (b.role, b.index) == (role, index))
    resources = dict(next(own, {}))
    arguments: dict[str, Any] = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
    }
    place = _reserved["places"].get((role, index))
    if place is not None:
        arguments["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            _reserved["group"], place
        )
    return arguments


def whole() -> bool:
    """Return whether every reserved place is on a node that is alive.

    Ray moves the places of a dead node as soon as another node has room for them.
    """
    import ray

    group = _reserved["group"]
    return group is None or ray.util.placement_group_table(group)["state"] == "CREATED"
