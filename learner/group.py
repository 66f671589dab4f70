"""The learner's ranks as one handle: start, update, publish, save; every call with a deadline."""

from __future__ import annotations

from typing import Any

import ray

from actors.records import Published
from cluster.environment import process_env
from cluster.remote import get, kill
from learner.worker import LearnerRank, UpdateJob, merge

HINT = "the learner's log in the session's logs folder of Ray"


class LearnerGroup:
    """`cfg`: learner.config.Config. Starts one actor a rank and joins them; raises DeadlineExceeded when one hangs."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        lr = cfg.learner
        env = process_env(lr.gpus)
        env["OMP_NUM_THREADS"] = str(lr.threads or max(1, int(lr.cpus)))
        actor = ray.remote(LearnerRank)
        self.ranks = [
            actor.options(name=f"learner-{r}", num_cpus=lr.cpus, num_gpus=lr.gpus, runtime_env={"env_vars": env})
            .remote(r, lr.ranks, cfg) for r in range(lr.ranks)]

    def start(self, checkpoint: str | None = None) -> dict[str, float]:
        """Build the engines, from a checkpoint's folder if given; returns {"parameters": count}."""
        lr = self.cfg.learner
        address, port = get(self.ranks[0].rendezvous.remote(), lr.timeout_s, "learner-0: rendezvous", HINT)
        started = [r.start.remote(address, port, checkpoint) for r in self.ranks]
        return get(started, lr.timeout_s, "learner: start", HINT)[0]

    def update(self, job: UpdateJob) -> dict[str, Any]:
        """Train on one batch. Returns {"stats": name -> (sum, count, min, max), "steps": a dict an optimizer step}."""
        results = get([r.update.remote(job) for r in self.ranks], self.cfg.learner.timeout_s,
                      f"learner: update of version {job.version}", HINT)
        stats: dict = {}
        for result in results:
            merge(stats, result["stats"])
        return {"stats": stats, "steps": results[0]["steps"]}

    def publish(self, version: int, probe_ids: list[list[int]] | None = None) -> Published:
        """The current weights as `version`, in the object store."""
        g = self.cfg.generator
        found = get([r.publish.remote(g.bucket_mib << 20, g.sync_tolerance, probe_ids) for r in self.ranks],
                    g.sync_timeout_s, f"learner: publish version {version}", HINT)[0]
        return Published(version, found["buckets"], found["probe"])

    def save_state(self, folder: str) -> None:
        """Write policy.safetensors (and critic.safetensors) into an existing folder."""
        get([r.save_state.remote(folder) for r in self.ranks], self.cfg.learner.timeout_s,
            f"learner: save {folder}", HINT)

    def save_model(self, directory: str, tokenizer: Any) -> None:
        """Write a Hugging Face directory that does not exist yet."""
        get([r.save_model.remote(directory, tokenizer) for r in self.ranks], self.cfg.learner.timeout_s,
            f"learner: save {directory}", HINT)

    def stop(self) -> None:
        for rank in self.ranks:
            kill(rank)
