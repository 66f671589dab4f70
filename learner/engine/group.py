"""The learner's ranks as one handle: start, update, publish, save; every call with a deadline."""

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
GRACE_S = 10.0  # one rank has failed: how long the others have to say why


class LearnerGroup:
    """`cfg`: conf.schema.Config. Starts one actor a rank and joins them. What is asked of them raises LearnerLost
    when one dies or hangs: the others cannot go on without it, and `revive` starts all of them anew.
    `rank`: their class; `role`: the name they have, and whose places they take (cluster/placement.py)."""

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
        """Build the engines, from a checkpoint's folder if given; returns {"parameters": count}."""
        return self.member.start(lambda: self._join(checkpoint))

    def revive(self, why: LearnerLost, checkpoint: str | None) -> None:
        """All ranks anew, from a checkpoint's folder or the initial model. Raises RestartsExhausted."""
        self.member.replace(why, lambda: self._join(checkpoint))

    def _join(self, checkpoint: str | None) -> dict[str, float]:
        address, port = self._ask([self.ranks[0].rendezvous.remote()], "rendezvous")[0]
        return self._ask([r.start.remote(address, port, checkpoint) for r in self.ranks], "start")[
            0
        ]

    def _all(self, method: str, *args: Any, shown: str, timeout_s: float = 0.0) -> list[Any]:
        """What every rank returns of `method`."""
        try:
            return self._ask(
                [getattr(r, method).remote(*args) for r in self.ranks], shown, timeout_s
            )
        except Exception as error:
            failure = failures.classify(error)
            if failure.action != "retry":
                raise
            raise LearnerLost(f"{shown}: {failure.reason}") from error

    def _ask(self, refs: list[Any], shown: str, timeout_s: float = 0.0) -> list[Any]:
        """What the ranks answer. Where one dies the others fail too, each in its way, and may be heard first: raises
        the error of one that is lost, if any."""
        try:
            return get(refs, timeout_s or self.cfg.learner.timeout_s, f"learner: {shown}", HINT)
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
        """Train on one batch. Returns {"stats": name -> Stat, "steps": a dict an optimizer step}."""
        results = self._all("update", job, shown=f"update of version {job.version}")
        stats = Accumulator()
        for result in results:
            stats.merge(result["stats"])
        return {"stats": stats, "steps": results[0]["steps"]}

    def publish(self, version: int, probe_ids: list[list[int]] | None = None) -> Published:
        """The current weights as `version`, in the object store."""
        g = self.cfg.generator
        found = self._all(
            "publish",
            g.bucket_mib << 20,
            g.sync_tolerance,
            probe_ids,
            shown=f"publish version {version}",
            timeout_s=g.sync_timeout_s,
        )[0]
        return Published(version, found["buckets"], found["probe"])

    def score(self, job: Any) -> list[tuple[int, list[float]]]:
        """(row of the plan, logits) of each answer of a RewardJob. Ranks must be learner.engine.reward_rank.RewardRank."""
        return [pair for part in self._all("score", job, shown="score") for pair in part]

    def save_state(self, folder: str) -> None:
        """Write policy.safetensors (and critic.safetensors) into an existing folder."""
        self._all("save_state", folder, shown=f"save {folder}")

    def save_model(self, directory: str, tokenizer: Any) -> None:
        """Write a Hugging Face directory that does not exist yet."""
        self._all("save_model", directory, tokenizer, shown=f"save {directory}")

    def stop(self) -> None:
        self.member.end()
