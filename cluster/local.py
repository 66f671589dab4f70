"""Connecting to Ray: a running cluster where one is named, else a local one that ends with the run."""

from __future__ import annotations

import os
from typing import Any

from cluster.environment import process_env


def demand(cfg: Any) -> float:
    """Logical CPUs that the configuration's actors reserve together."""
    reference = cfg.reference.count * cfg.reference.cpus if cfg.algorithm.beta > 0 else 0.0
    generators = cfg.generator.count * cfg.generator.cpus if cfg.stage == "rl" else 0.0
    return cfg.learner.ranks * cfg.learner.cpus + generators + reference + 1.0  # 1: rewards and small services


def connect(cfg: Any, namespace: str) -> str:
    """Join or start a cluster; returns one sentence that says which. Actors of the run live in `namespace`."""
    import ray

    address = cfg.cluster.address
    named = os.environ.get("RAY_ADDRESS", "")
    common = dict(namespace=namespace, logging_level="ERROR", log_to_driver=False)
    if address not in ("local", "auto") or (address == "auto" and named):
        target = named if address == "auto" else address
        ray.init(address=target, **common)
        return f"joined the Ray cluster at {ray.get_runtime_context().gcs_address}"
    os.environ.update(process_env())
    cpus = cfg.cluster.num_cpus or max(os.cpu_count() or 1, int(-(-demand(cfg) // 1)))
    context = ray.init(address="local", num_cpus=cpus, include_dashboard=cfg.cluster.dashboard,
                       object_store_memory=cfg.cluster.object_store_mib << 20, **common)
    where = f"; dashboard at http://{context.dashboard_url}" if context.dashboard_url else ""
    return f"started a local Ray cluster with {cpus} logical CPUs{where}"
