"""The learner's ranks as one handle: start, update, publish, save. Every call has a deadline."""

from __future__ import annotations

from typing import Any

import ray

from actors.records import Published
from cluster import placement
from cluster.environment import process_env
from cluster.monitoring.stat import Accumulator
from cluster.supervision import failures
from cluster.supervision.failures import LearnerLost
from cluster.supervision.remote import get
from cluster.supervision.supervisor import Supervised
from learner.engine.job import UpdateJob
from learner.engine.rank import LearnerRank

HINT = "the learner's log in the session's logs folder of Ray"
GRACE_S = 10.0  # how long the other ranks have to fail too, once one rank has failed


class LearnerGroup:
    """The learner: one actor for each rank, joined to one process group.

    Ranks live and die together, because the others cannot go on without a lost one. So every call
    raises LearnerLost where a rank dies or hangs, and `revive` replaces all ranks.

    cfg: conf.schema.Config. rank: the class of the actors. role: their name, and the role whose
    places they take (cluster/placement.py)."""

    def __init__(self, cfg: Any, rank: type = LearnerRank, role: str = "learner") -> None:
        self.cfg, self.rank, self.role = cfg, rank, role
        self.member = Supervised(
            role,
            self._create,
            cfg.cluster,
            "learner.restarts",
            cfg.learner.restarts,
            cfg.learner.timeout_s,
            HINT,
        )

    def _create(self, suffix: str) -> list[Any]:
        lr = self.cfg.learner
        env = process_env(lr.gpus)
        env["OMP_NUM_THREADS"] = str(lr.threads or max(1, int(lr.cpus)))
        actor = ray.remote(self.rank)
        return [
            actor.options(
                name=f"{self.role}-{r}{suffix}",
                runtime_env={"env_vars": env},
                **placement.options(self.cfg, self.role, r),
            ).remote(r, lr.ranks, self.cfg)
            for r in range(lr.ranks)
        ]

    @property
    def ranks(self) -> list[Any]:
        return self.member.actors

    @property
    def restarts(self) -> int:
        return self.member.health.restarts

    def start(self, checkpoint: str | None = None) -> dict[str, float]:
        """Build the engines, from a checkpoint's folder or the initial model (None); returns
        {"parameters": count}."""
        return self.member.start(lambda: self._join(checkpoint))

    def revive(self, why: LearnerLost, checkpoint: str | None) -> None:
        """Replace all ranks; they start from a checkpoint's folder or the initial model (None).
        Raises RestartsExhausted."""
        self.member.replace(why, lambda: self._join(checkpoint))

    def _join(self, checkpoint: str | None) -> dict[str, float]:
        """Join the ranks to one process group and build their engines."""
        address, port = self._answers([self.ranks[0].rendezvous.remote()], "rendezvous")[0]
        refs = [rank.start.remote(address, port, checkpoint) for rank in self.ranks]
        return self._answers(refs, "start")[0]

    def _call(self, method: str, *args: Any, operation: str, timeout_s: float = 0.0) -> list[Any]:
        """Call a method of every rank; returns their results. Raises LearnerLost where a rank is
        lost."""
        try:
            refs = [getattr(rank, method).remote(*args) for rank in self.ranks]
            return self._answers(refs, operation, timeout_s)
        except Exception as error:
            failure = failures.classify(error)
            if failure.action != "retry":
                raise
            raise LearnerLost(f"{operation}: {failure.reason}") from error

    def _answers(self, refs: list[Any], operation: str, timeout_s: float = 0.0) -> list[Any]:
        """Wait for the answers of the ranks.

        Where a rank dies, the other ranks fail as well, with errors of their own that may come
        first. Raises the error of a rank that is lost, if there is one within GRACE_S seconds, and
        otherwise the first error."""
        try:
            return get(refs, timeout_s or self.cfg.learner.timeout_s, f"learner: {operation}", HINT)
        except Exception as error:
            if failures.classify(error).action == "retry":
                raise
            for ref in ray.wait(refs, num_returns=len(refs), timeout=GRACE_S, fetch_local=False)[0]:
                try:
                    ray.get(ref, timeout=GRACE_S)
                except Exception as other:
                    if failures.classify(other).action == "retry":
                        raise
            raise

    def update(self, job: UpdateJob) -> dict[str, Any]:
        """Train on one batch. Returns {"stats": name -> Stat over all ranks, "steps": one dict for
        each optimizer step}."""
        results = self._call("update", job, operation=f"update of version {job.version}")
        stats = Accumulator()
        for result in results:
            stats.merge(result["stats"])
        return {"stats": stats, "steps": results[0]["steps"]}

    def publish(self, version: int, probe_ids: list[list[int]] | None = None) -> Published:
        """Put the current weights into the object store as `version`."""
        g = self.cfg.generator
        published = self._call(
            "publish",
            g.bucket_mib << 20,
            g.sync_tolerance,
            probe_ids,
            operation=f"publish version {version}",
            timeout_s=g.sync_timeout_s,
        )[0]
        return Published(version, published["buckets"], published["probe"])

    def score(self, job: Any) -> list[tuple[int, list[float]]]:
        """Return (row of the plan, logits) for each answer of a RewardJob. The ranks must be of
        class learner.engine.reward_rank.RewardRank."""
        return [pair for part in self._call("score", job, operation="score") for pair in part]

    def save_state(self, folder: str) -> None:
        """Write policy.safetensors (and critic.safetensors) into an existing folder."""
        self._call("save_state", folder, operation=f"save {folder}")

    def save_model(self, directory: str, tokenizer: Any) -> None:
        """Write a Hugging Face directory that does not exist yet."""
        self._call("save_model", directory, tokenizer, operation=f"save {directory}")

    def stop(self) -> None:
        """End all ranks."""
        self.member.end()
