"""Dispatching groups to generators, collecting them, and bringing a dead generator back.

The pool owns the generator actors. A group whose generator died, or that is past its deadline, is given out again:
its seeds are part of the request, so the same completions come back whoever serves it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from actors.data.prompt import Prompt
from actors.generator import Generator, engine_args
from actors.records import GroupMeta, GroupRequest, Published, SamplingParams
from actors.staleness import sample_seed
from cluster import placement
from cluster.environment import generator_env
from cluster.supervision import failures
from cluster.supervision.health import PROBES
from cluster.supervision.remote import DeadlineExceeded
from cluster.supervision.supervisor import Supervised, tell

HINT = "the generator's log in the session's logs folder of Ray"


@dataclass
class Group:
    """One finished group: its prompt, its scalars, and a reference of its ROLLOUT batch."""

    prompt: Prompt
    meta: GroupMeta
    table: ray.ObjectRef


@dataclass
class _Ticket:
    prompt: Prompt
    request: GroupRequest
    generator: int
    deadline: float = 0.0
    actor: Any = None  # that serves it: another one once its generator was replaced
    meta_ref: Any = None
    table_ref: Any = None


class GeneratorPool:
    """`model_path`: a Hugging Face directory; `stop_token_ids` end a completion; `max_length`: context, in tokens."""

    def __init__(
        self, cfg: Any, model_path: str, stop_token_ids: list[int], max_length: int
    ) -> None:
        self.cfg, self.stop = cfg, stop_token_ids
        self.args = engine_args(
            cfg.generator, model_path, cfg.model.dtype, max_length, cfg.generator.gpus > 0
        )
        self.published: Published | None = None
        self.epoch = 0  # of GroupRequest
        self.look_s = (
            cfg.cluster.probe_timeout_s / PROBES
        )  # between looks at the pings while nothing finishes
        g = cfg.generator
        self.members = [
            Supervised(
                f"generator-{i}",
                partial(self._create, i),
                cfg.cluster,
                "generator.restarts",
                g.restarts,
                g.start_timeout_s,
                HINT,
                lambda actor: actor.ping.remote(),
                partial(self._homeless, i),
            )
            for i in range(g.count)
        ]
        self.benched: dict[
            int, Exception
        ] = {}  # lost with its node, and no other has room: why it was lost

    def _create(self, index: int, suffix: str) -> list[Any]:
        g = self.cfg.generator
        env = generator_env(g.kv_cache_gib, g.gpus)
        if g.threads:
            env["OMP_NUM_THREADS"] = str(g.threads)
        options = {
            "name": f"generator-{index}{suffix}",
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": env},
            **placement.options(self.cfg, "generator", index),
        }
        return [
            ray.remote(Generator)
            .options(**options)
            .remote(f"generator-{index}", self.args, self.stop)
        ]

    def _homeless(self, index: int) -> bool:
        return not placement.whole() and any(i != index for i in self.serving)

    @property
    def serving(self) -> list[int]:
        """Those that work is given to."""
        return [i for i in range(len(self.members)) if i not in self.benched]

    @property
    def actors(self) -> list[Any]:
        return [m.actor for m in self.members]

    @property
    def restarts(self) -> int:
        return sum(m.health.restarts for m in self.members)

    def start(self) -> None:
        """Until every engine answers."""
        for member in self.members:
            member.start()

    def sync(self, published: Published) -> dict[str, float]:
        """Every generator loads and proves `published`; returns the worst of each figure over the generators.

        Raises LearnerLost where the learner died and took the weights along."""
        self.published = published
        refs = {i: self._load(i) for i in self.serving}
        found = []
        for index in list(self.benched) if placement.whole() else ():
            tell(f"{self.members[index].name}: a node has room for it")
            found.append(self.revive(index, self.benched.pop(index)))
        for index, ref in refs.items():
            try:
                found.append(self._proved(index, ref))
            except Exception as error:  # noqa: BLE001 - classified
                found.append(self.revive(index, error))
            if (
                self.members[index].health.state == "stale"
            ):  # it was replaced while the learner was gone
                self.members[index].health.move("healthy")
        return {k: max(f[k] for f in found if f) for k in next(f for f in found if f)}

    def _load(self, index: int) -> Any:
        p = self.published
        return self.members[index].actor.update_weights.remote(
            p.version, p.buckets, p.probe, self.cfg.generator.sync_timeout_s
        )

    def _proved(self, index: int, ref: Any) -> dict[str, float]:
        """What `_load` found, once the generator holds the weights."""
        member = self.members[index]
        return member.wait(
            ref,
            self.cfg.generator.sync_timeout_s,
            f"{member.name}: update to version {self.published.version}",
        )

    def revive(self, index: int, why: Exception) -> dict[str, float]:
        """Replace a dead or hung generator by a new one that has proved the current weights. Where no node has room for
        it the others go on, and `sync` brings it back when one has."""

        def catch_up() -> dict[str, float]:
            return self._proved(index, self._load(index)) if self.published else {}

        try:
            return self.members[index].replace(why, catch_up)
        except failures.NoRoom as error:
            tell(f"{error}; the other generators go on, and it comes back when one has")
            self.benched[index] = why
            return {}

    def abandon(self) -> None:
        """Every generator forgets the groups it works on: the run goes back to a checkpoint."""
        self.epoch += 1
        for index in self.serving:
            member = self.members[index]
            try:
                member.wait(
                    member.actor.abandon.remote(self.epoch),
                    self.cfg.generator.sync_timeout_s,
                    f"{member.name}: abandon",
                )
            except Exception as error:  # noqa: BLE001 - classified
                self.published = None  # the next sync brings the new one up to date
                self.revive(index, error)

    def silent(self) -> Iterator[tuple[int, Exception]]:
        """(index, error) of each generator that no longer answers pings."""
        for index, member in enumerate(self.members):
            if error := member.silent():
                yield index, error


class Dispatcher:
    """Gives groups to the generator with the fewest of them and yields them as they finish.

    `drop(group_id, reason)` is told of a group that cannot be worked on; without it such a group stops the run."""

    def __init__(
        self,
        pool: GeneratorPool,
        run_seed: int,
        timeout_s: float,
        drop: Callable[[int, str], None] | None = None,
    ) -> None:
        self.pool, self.run_seed, self.timeout_s, self.drop = pool, run_seed, timeout_s, drop
        self.tickets: dict[int, _Ticket] = {}  # by group id, in order of submission

    def submit(
        self,
        group_id: int,
        prompt: Prompt,
        prompt_ids: list[int],
        n: int,
        sampling: SamplingParams,
        version: int,
    ) -> None:
        """Start a group of n completions under policy `version`. Ids must be new."""
        seeds = [
            sample_seed(self.run_seed, prompt.prompt_id, group_id, i, version) for i in range(n)
        ]
        request = GroupRequest(
            group_id, prompt.prompt_id, prompt_ids, seeds, sampling, self.pool.epoch
        )
        self._send(_Ticket(prompt, request, self._idlest()))

    def _idlest(self) -> int:
        """The generator with the fewest groups, of those that serve."""
        load = dict.fromkeys(self.pool.serving, 0)
        for ticket in self.tickets.values():
            if ticket.generator in load:
                load[ticket.generator] += 1
        return min(load, key=load.__getitem__)

    def _send(self, ticket: _Ticket) -> None:
        ticket.actor = self.pool.actors[ticket.generator]
        ticket.meta_ref, ticket.table_ref = ticket.actor.generate.options(num_returns=2).remote(
            ticket.request
        )
        ticket.deadline = time.monotonic() + self.timeout_s
        self.tickets[ticket.request.group_id] = ticket

    def finished(self) -> Iterator[Group]:
        """Wait until at least one group is done (or lost and given out again), and yield those that are.

        A generator that died, that let a group's deadline pass or that answers no ping is replaced, and its groups are
        given out again.
        """
        refs = {t.meta_ref: t for t in self.tickets.values()}
        wait_s = max(0.0, min(t.deadline for t in refs.values()) - time.monotonic())
        ready, _ = ray.wait(
            list(refs), num_returns=1, timeout=min(wait_s, self.pool.look_s), fetch_local=False
        )
        if ready:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
        for ref in ready:
            ticket = refs[ref]
            if (
                self.tickets.get(ticket.request.group_id) is ticket and ticket.meta_ref is ref
            ):  # else given out again
                if group := self._result(ticket):
                    yield group
        self._check_deadlines()

    def _result(self, ticket: _Ticket) -> Group | None:
        """A finished group; None where it failed, which is seen to."""
        group_id = ticket.request.group_id
        try:
            meta = ray.get(ticket.meta_ref, timeout=self.timeout_s)
        except Exception as error:
            failure = failures.classify(error)
            if failure.action == "retry":
                self._lost(ticket.generator, ticket.actor, error)
            elif failure.action == "drop" and self.drop is not None:
                del self.tickets[group_id]
                self.drop(group_id, failure.reason)
            else:
                raise
            return None
        del self.tickets[group_id]
        return Group(ticket.prompt, meta, ticket.table_ref)

    def _check_deadlines(self) -> None:
        for index, error in self.pool.silent():
            self._lost(index, self.pool.actors[index], error)
        now = time.monotonic()
        late = next((t for t in self.tickets.values() if t.deadline <= now), None)
        if late:
            error = DeadlineExceeded(
                f"generator-{late.generator}: group {late.request.group_id} not done within "
                f"rollout.timeout_s={self.timeout_s:g}"
            )
            self._lost(late.generator, late.actor, error)

    def _lost(self, index: int, actor: Any, error: Exception) -> None:
        if (
            self.pool.actors[index] is actor
        ):  # else replaced already: by a sync, or for another dispatcher
            self.pool.revive(index, error)
        for other in [t for t in self.tickets.values() if t.generator == index]:
            if other.actor is not self.pool.actors[index]:
                other.generator = index if index in self.pool.serving else self._idlest()
                self._send(other)
