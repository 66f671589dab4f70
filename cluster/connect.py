"""Connecting to Ray: a running cluster where one is named, else a local one that ends with the run."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from contextlib import suppress
from typing import Any

from cluster import placement, security
from cluster.environment import process_env, ray_folder
from cluster.plan import amount

_session: list[str] = []  # the folder of the local cluster that `connect` started


def target(cfg: Any) -> str:
    """Address of the running cluster to join; "" for a local one of the run's own."""
    address = cfg.cluster.address
    return {"local": "", "auto": os.environ.get("RAY_ADDRESS") or started_here()}.get(
        address, address
    )


def started_here() -> str:
    """Address of the cluster that `ray start` (`make cluster`) began on this machine, where it answers, else ""."""
    file = ray_folder() / "ray_current_cluster"
    host, _, port = (file.read_text().strip() if file.is_file() else "").rpartition(":")
    if not port.isdigit():
        return ""
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
        return f"{host}:{port}"
    return ""


def store_shortage(need: int) -> str:
    """A sentence where a local cluster's object store and the disk behind it have no `need` bytes left, else ""."""
    import ray

    free = int(ray.available_resources().get("object_store_memory", 0))
    if free >= need or not _session:
        return ""
    disk = shutil.disk_usage(_session[0])
    full = float(
        os.environ.get("RAY_local_fs_capacity_threshold", "0.95")
    )  # Ray's: it spills nothing past this share
    room = max(0, int(full * disk.total) - disk.used)
    return (
        ""
        if free + room >= need
        else (
            f"Ray's object store has {amount(free)} free and its disk ({_session[0]}) {amount(room)}, but {amount(need)} "
            "are needed. Raise cluster.object_store_mib, or free space on that disk."
        )
    )


def connect(cfg: Any, namespace: str) -> str:
    """Join or start a cluster; returns one sentence that says which. Actors of the run live in `namespace`."""
    address = target(cfg)
    mine = address.startswith(("127.", "localhost:", "[::1]:"))
    if not address or mine:
        if "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ:
            raise ValueError(
                "RAY_AUTH_MODE is not set and Ray is imported already, so it asks for no token. Call "
                "cluster.security.secure_local_cluster() before importing Ray, or set RAY_AUTH_MODE "
                "(token, or disabled to do without)."
            )
        security.secure_local_cluster()  # Ray takes the loopback for the machine's own address, unless told so
    elif address == started_here() and security.token_source():
        os.environ.setdefault(
            "RAY_AUTH_MODE", "token"
        )  # as Ray does for a cluster that it finds by itself
    import ray

    common = dict(namespace=namespace, logging_level="ERROR", log_to_driver=False)
    if address:
        ray.init(address=address, **common)
        return (
            f"joined the Ray cluster at {ray.get_runtime_context().gcs_address} (cluster=local starts one for this "
            "run alone)"
        )
    os.environ.update(process_env())
    need = placement.total([b.resources for b in placement.bundles(cfg)])
    cpus = cfg.cluster.num_cpus or max(os.cpu_count() or 1, int(-(-need.get("CPU", 0.0) // 1)))
    context = ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=cfg.cluster.dashboard,
        object_store_memory=cfg.cluster.object_store_mib << 20,
        resources={n: v for n, v in need.items() if n not in ("CPU", "GPU")},
        **common,
    )
    _session[:] = [context.address_info["session_dir"]]
    where = f"; dashboard at http://{context.dashboard_url}" if context.dashboard_url else ""
    return f"started a local Ray cluster with {cpus} logical CPUs{where}"
