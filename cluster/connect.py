"""Connecting to Ray: a running cluster if one is named, else a local one for this run alone."""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
from contextlib import suppress
from typing import Any

from cluster import placement, security
from cluster.environment import process_env, ray_folder
from cluster.plan import amount
from conf.schema import Config

LOOPBACK = ("127.", "localhost:", "[::1]:")
# Ray writes objects to disk only as long as less than this share of the disk is in use.
RAY_DISK_SHARE = "0.95"
_session: list[str] = []  # the folder of the local cluster that `connect` started


def target(cfg: Config) -> str:
    """Return the address of the running cluster to join, or "" to start a local one."""
    address = cfg.cluster.address
    if address == "local":
        return ""
    if address == "auto":
        return os.environ.get("RAY_ADDRESS") or running_here()
    return address


def running_here() -> str:
    """Return the address of the cluster that `ray start` or `make cluster` started on this machine,
    or "" if none answers."""
    file = ray_folder() / "ray_current_cluster"
    host, _, port = (file.read_text().strip() if file.is_file() else "").rpartition(":")
    if not port.isdigit():
        return ""
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
        return f"{host}:{port}"
    return ""


def store_shortage(need: int) -> str:
    """Return "" if a local cluster can store `need` more bytes of objects, else a sentence.

    The object store has its own memory and then the disk of Ray's session, to which it spills.
    """
    import ray

    free = int(ray.available_resources().get("object_store_memory", 0))
    if free >= need or not _session:
        return ""
    disk = shutil.disk_usage(_session[0])
    share = float(os.environ.get("RAY_local_fs_capacity_threshold", RAY_DISK_SHARE))
    on_disk = max(0, int(share * disk.total) - disk.used)
    if free + on_disk >= need:
        return ""
    return (
        f"Ray's object store has {amount(free)} free and its disk ({_session[0]}) "
        f"{amount(on_disk)}, but {amount(need)} are needed. Raise cluster.object_store_mib, or "
        "free space on that disk."
    )


def connect(cfg: Config, namespace: str) -> str:
    """Join or start a cluster. Returns a sentence that says which one.

    The actors of the run live in Ray's `namespace`. Raises ValueError if Ray was imported before it
    could be told to ask for a token.
    """
    address = target(cfg)
    _secure(address)
    import ray

    common = dict(namespace=namespace, logging_level="ERROR", log_to_driver=False)
    if address:
        ray.init(address=address, **common)
        return (
            f"joined the Ray cluster at {ray.get_runtime_context().gcs_address} (cluster=local "
            "starts one for this run alone)"
        )
    os.environ.update(process_env())
    need = placement.total([b.resources for b in placement.bundles(cfg)])
    cpus = cfg.cluster.num_cpus or max(os.cpu_count() or 1, math.ceil(need.get("CPU", 0.0)))
    context: Any = ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=cfg.cluster.dashboard,
        object_store_memory=cfg.cluster.object_store_mib << 20,
        resources={name: v for name, v in need.items() if name not in ("CPU", "GPU")},
        **common,
    )
    _session[:] = [context.address_info["session_dir"]]
    dashboard = f"; dashboard at http://{context.dashboard_url}" if context.dashboard_url else ""
    return f"started a local Ray cluster with {cpus} logical CPUs{dashboard}"


def _secure(address: str) -> None:
    """Set the environment variables that make Ray ask for a token. `address`: as from `target`.

    This must come before Ray is imported. A cluster that is joined at an address on the loopback is
    treated as a local one, because both have to use the loopback as this node's own address.
    """
    if not address or address.startswith(LOOPBACK):
        if "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ:
            raise ValueError(
                "RAY_AUTH_MODE is not set and Ray is imported already, so it asks for no token. "
                "Call cluster.security.secure_local_cluster() before importing Ray, or set "
                "RAY_AUTH_MODE (token, or disabled to do without)."
            )
        security.secure_local_cluster()
    elif address == running_here() and security.token_source():
        # Ray itself does the same for a cluster that it finds on this machine.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
