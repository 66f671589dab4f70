"""Connecting to Ray: a running cluster where one is named, else a local one that ends with the run."""

from __future__ import annotations

import os
import shutil
from typing import Any

from cluster import security
from cluster.environment import process_env
from cluster.plan import amount

_session: list[str] = []  # the folder of the local cluster that `connect` started


def demand(cfg: Any) -> float:
    """Logical CPUs that the configuration's actors reserve together."""
    reference = cfg.reference.count * cfg.reference.cpus if cfg.algorithm.beta > 0 else 0.0
    generators = cfg.generator.count * cfg.generator.cpus if cfg.stage == "rl" else 0.0
    return cfg.learner.ranks * cfg.learner.cpus + generators + reference + 1.0  # 1: rewards and small services


def target(cfg: Any) -> str:
    """Address of the running cluster to join; "" for a local one of the run's own."""
    address = cfg.cluster.address
    return {"local": "", "auto": os.environ.get("RAY_ADDRESS", "")}.get(address, address)


def store_shortage(need: int) -> str:
    """A sentence where a local cluster's object store and the disk behind it have no `need` bytes left, else ""."""
    import ray

    free = int(ray.available_resources().get("object_store_memory", 0))
    if free >= need or not _session:
        return ""
    disk = shutil.disk_usage(_session[0])
    full = float(os.environ.get("RAY_local_fs_capacity_threshold", "0.95"))  # Ray's: it spills nothing past this share
    room = max(0, int(full * disk.total) - disk.used)
    return "" if free + room >= need else (
        f"Ray's object store has {amount(free)} free and its disk ({_session[0]}) {amount(room)}, but {amount(need)} "
        "are needed. Raise cluster.object_store_mib, or free space on that disk.")


def connect(cfg: Any, namespace: str) -> str:
    """Join or start a cluster; returns one sentence that says which. Actors of the run live in `namespace`."""
    address = target(cfg)
    if not address:
        security.secure_local_cluster()
    import ray

    common = dict(namespace=namespace, logging_level="ERROR", log_to_driver=False)
    if address:
        ray.init(address=address, **common)
        return f"joined the Ray cluster at {ray.get_runtime_context().gcs_address}"
    os.environ.update(process_env())
    cpus = cfg.cluster.num_cpus or max(os.cpu_count() or 1, int(-(-demand(cfg) // 1)))
    context = ray.init(address="local", num_cpus=cpus, include_dashboard=cfg.cluster.dashboard,
                       object_store_memory=cfg.cluster.object_store_mib << 20, **common)
    _session[:] = [context.address_info["session_dir"]]
    where = f"; dashboard at http://{context.dashboard_url}" if context.dashboard_url else ""
    return f"started a local Ray cluster with {cpus} logical CPUs{where}"
