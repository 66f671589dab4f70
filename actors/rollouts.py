"""The generator actors, and the dispatcher that gives groups to them and collects the results.

A group whose generator died or hung, or whose deadline passed, is given out again. Its seeds are
part of the request, so every generator returns the same completions for it.
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
from cluster.supervision.pool import Pool
from cluster.supervision.remote import DeadlineExceeded
from cluster.supervision.supervisor import Supervised, tell

HINT = "the generator's log in the session's logs folder of Ray"


@dataclass
class Group:
    """One finished group: its prompt, its scalars, and the reference of its ROLLOUT batch."""

    prompt: Prompt
    meta: GroupMeta
    table: ray.ObjectRef


@dataclass
class Ticket:
    """A group that is being generated."""

    prompt: Prompt
    request: GroupRequest
    generator: int  # index of the generator that has it
    deadline: float = 0.0  # monotonic seconds
    actor: Any = None  # the process that has it: no longer the generator's, once that was replaced
    meta_ref: Any = None
    table_ref: Any = None


class GeneratorPool(Pool):
    """The generators, all of which hold the weights that were published last.

    A generator that is lost with its node is benched where no other node has room for it: the
    others go on without it, and the next `sync` for which there is room brings it back.

    model_path: a Hugging Face directory. stop_token_ids: tokens that end a completion. max_length:
    tokens of prompt and completion together."""

    def __init__(
        self, cfg: Any, model_path: str, stop_token_ids: list[int], max_length: int
    ) -> None:
        self.cfg, self.stop_ids = cfg, stop_token_ids
        self.args = engine_args(
            cfg.generator, model_path, cfg.model.dtype, max_length, cfg.generator.gpus > 0
        )
        self.published: Published | None = None
        self.epoch = 0  # of GroupRequest; `abandon` begins a new one
        # How often to look at the pings while no group finishes.
        self.look_s = cfg.cluster.probe_timeout_s / PROBES
        self.benched: dict[int, Exception] = {}  # by index: why the generator was lost
        g = cfg.generator
        super().__init__(
            [
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
        )

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
            .remote(f"generator-{index}", self.args, self.stop_ids)
        ]

    def _homeless(self, index: int) -> bool:
        """Return whether a node is missing and other generators can go on without this one."""
        return not placement.whole() and any(i != index for i in self.serving)

    @property
    def serving(self) -> list[int]:
        """Indices of the generators that get work: all that are not benched."""
        return [i for i in range(len(self.members)) if i not in self.benched]

    @property
    def actors(self) -> list[Any]:
        """The present actor of each generator."""
        return [m.actor for m in self.members]

    def sync(self, published: Published) -> dict[str, float]:
        """Let every generator load and prove `published`; returns the largest of each figure over
        the generators.

        Raises LearnerLost where the learner died, and the weights with it."""
        self.published = published
        refs = {i: self._send_weights(i) for i in self.serving}
        figures = []
        for index in list(self.benched) if placement.whole() else ():
            tell(f"{self.members[index].name}: a node has room for it")
            figures.append(self.replace(index, self.benched.pop(index)))
        for index, ref in refs.items():
            timeout_s, operation = self.cfg.generator.sync_timeout_s, self._update
            figures.append(self.answer(index, ref, timeout_s, operation))
            health = self.members[index].health
            if health.state == "stale":  # the learner was lost while this generator was replaced
                health.move("healthy")
        return {k: max(f[k] for f in figures if f) for k in next(f for f in figures if f)}

    @property
    def _update(self) -> str:
        return f"update to version {self.published.version}"

    def _send_weights(self, index: int) -> Any:
        p = self.published
        return self.members[index].actor.update_weights.remote(
            p.version, p.buckets, p.probe, self.cfg.generator.sync_timeout_s
        )

    def catch_up(self, index: int) -> dict[str, float]:
        """Let a new generator load and prove the published weights, if there are any; returns its
        figures."""
        if self.published is None:
            return {}
        member, ref = self.members[index], self._send_weights(index)
        return member.wait(ref, self.cfg.generator.sync_timeout_s, f"{member.name}: {self._update}")

    def replace(self, index: int, why: Exception) -> dict[str, float]:
        """See Pool.replace. Benches the generator where no node has room for its successor."""
        try:
            return super().replace(index, why)
        except failures.NoRoom as error:
            tell(f"{error}; the other generators go on, and it comes back when one has")
            self.benched[index] = why
            return {}

    def abandon(self) -> None:
        """Let every generator forget the groups it works on, because the run goes back to a
        checkpoint.

        The published weights died with the learner. A generator that is replaced here gets new ones
        by the next `sync`."""
        self.epoch += 1
        self.published = None
        for index in self.serving:
            ref = self.members[index].actor.abandon.remote(self.epoch)
            self.answer(index, ref, self.cfg.generator.sync_timeout_s, "abandon")


class Dispatcher:
    """Gives groups to the generator with the fewest of them, and yields them as they finish.

    `drop(group_id, reason)` is called for a group that no generator takes. Without it such a group
    stops the run."""

    def __init__(
        self,
        pool: GeneratorPool,
        run_seed: int,
        timeout_s: float,
        drop: Callable[[int, str], None] | None = None,
    ) -> None:
        self.pool, self.run_seed, self.timeout_s, self.drop = pool, run_seed, timeout_s, drop
        self.tickets: dict[int, Ticket] = {}  # by group id, in the order given out last

    def submit(
        self,
        group_id: int,
        prompt: Prompt,
        prompt_ids: list[int],
        n: int,
        sampling: SamplingParams,
        version: int,
    ) -> None:
        """Start a group of n completions under policy `version`. The group id must be new."""
        seeds = [
            sample_seed(self.run_seed, prompt.prompt_id, group_id, i, version) for i in range(n)
        ]
        request = GroupRequest(
            group_id, prompt.prompt_id, prompt_ids, seeds, sampling, self.pool.epoch
        )
        self._send(Ticket(prompt, request, self._least_loaded()))

    def clear(self) -> None:
        """Forget all tickets, because the run goes back to a checkpoint (see
        GeneratorPool.abandon)."""
        self.tickets.clear()

    def _least_loaded(self) -> int:
        """Return the index of the serving generator with the fewest groups."""
        load = dict.fromkeys(self.pool.serving, 0)
        for ticket in self.tickets.values():
            if ticket.generator in load:
                load[ticket.generator] += 1
        return min(load, key=load.__getitem__)

    def _send(self, ticket: Ticket) -> None:
        ticket.actor = self.pool.actors[ticket.generator]
        ticket.meta_ref, ticket.table_ref = ticket.actor.generate.options(num_returns=2).remote(
            ticket.request
        )
        ticket.deadline = time.monotonic() + self.timeout_s
        self.tickets[ticket.request.group_id] = ticket

    def finished(self) -> Iterator[Group]:
        """Wait until a group is done, a generator is lost, or it is time to look at the pings;
        yield the groups that are done.

        A generator is replaced, and its groups given out again, where it died, let a group's
        deadline pass, or does not answer its pings."""
        refs = {t.meta_ref: t for t in self.tickets.values()}
        wait_s = max(0.0, min(t.deadline for t in refs.values()) - time.monotonic())
        ready, _ = ray.wait(
            list(refs), num_returns=1, timeout=min(wait_s, self.pool.look_s), fetch_local=False
        )
        if ready:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
        for ref in ready:
            ticket = refs[ref]
            given_again = (
                self.tickets.get(ticket.request.group_id) is not ticket
                or ticket.meta_ref is not ref
            )
            if not given_again and (group := self._result(ticket)):
                yield group
        self._replace_silent()
        self._replace_late()

    def _result(self, ticket: Ticket) -> Group | None:
        """Return a finished group, or None where it failed: it was given out again, or dropped."""
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

    def _replace_silent(self) -> None:
        """Replace the generators that do not answer their pings."""
        for index, error in self.pool.silent():
            self._lost(index, self.pool.actors[index], error)

    def _replace_late(self) -> None:
        """Replace the generator of a group that is past its deadline, if there is one."""
        now = time.monotonic()
        late = next((t for t in self.tickets.values() if t.deadline <= now), None)
        if late:
            error = DeadlineExceeded(
                f"generator-{late.generator}: group {late.request.group_id} not done within "
                f"rollout.timeout_s={self.timeout_s:g}"
            )
            self._lost(late.generator, late.actor, error)

    def _lost(self, index: int, actor: Any, error: Exception) -> None:
        """Replace a generator whose `actor` is lost, and give its groups out again."""
        # Another actor in its place means that it was replaced already: by a sync, or for
        # another dispatcher.
        if self.pool.actors[index] is actor:
            self.pool.replace(index, error)
        for ticket in [t for t in self.tickets.values() if t.generator == index]:
            if ticket.actor is not self.pool.actors[index]:
                serves = index in self.pool.serving
                ticket.generator = index if serves else self._least_loaded()
                self._send(ticket)
