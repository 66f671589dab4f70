"""Several runs in one Ray session: `python -m tests.flow.many_runs FOLDER NAME=ARGS ...`, ARGS a
JSON list.

Each goes through learner.main.load and learner.run.execute as on the command line. Ray and the vLLM
engine are started once, since nothing in them depends on the algorithm. FOLDER/NAME becomes the
run's folder; FOLDER/status.json says how each ended.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import cluster.connect
import cluster.placement
from learner import main, run

KEPT = "generator-"


def connect(cfg: Any, namespace: str, real: Any = cluster.connect.connect) -> str:
    ray = sys.modules.get("ray")
    return "the session's cluster" if ray and ray.is_initialized() else real(cfg, namespace)


def end_actors(*_: Any) -> None:
    """In place of ending Ray: end the actors of this run, and wait until their names are free."""
    import ray

    deadline = time.monotonic() + 30
    while ray.is_initialized() and (
        names := [n for n in ray.util.list_named_actors() if not n.startswith(KEPT)]
    ):
        for name in names:
            try:
                ray.kill(ray.get_actor(name))
            except ValueError:  # gone since it was listed
                continue
        if time.monotonic() > deadline:
            raise RuntimeError(f"actors do not end: {names}")
        time.sleep(0.05)


def keep_generators() -> None:
    from learner.stages import engines

    made, real = [], engines.GeneratorPool

    def pool(cfg: Any, *args: Any) -> Any:
        if not made:
            made.append(real(cfg, *args))
        made[0].cfg, made[0].published = cfg, None
        return made[0]

    engines.GeneratorPool = pool


def main_loop(folder: Path, jobs: dict[str, list[str]]) -> None:
    from cluster.security import secure_local_cluster

    secure_local_cluster()  # before Ray is imported
    keep_generators()
    cluster.connect.connect = connect
    cluster.placement.reserve = lambda _: (
        ""
    )  # the generators outlive a run, and would hold its place
    close, run.close = run.close, end_actors
    status = {}
    for name, args in jobs.items():
        began = time.monotonic()
        status[name] = run.execute(main.load([*args, f"run_dir={folder / name}"]))
        print(
            f"many_runs: {name} ended with {status[name]} after {time.monotonic() - began:.1f} s",
            flush=True,
        )
        (folder / "status.json").write_text(json.dumps(status))
    close(None, 0)


if __name__ == "__main__":
    main_loop(
        Path(sys.argv[1]), {k: json.loads(v) for k, v in (a.split("=", 1) for a in sys.argv[2:])}
    )
