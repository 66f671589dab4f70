"""Dispatching groups to generators, collecting them, and bringing a dead generator back.

The pool owns the generator actors. A group whose generator died, or that is past its deadline, is given out again:
its seeds are part of the request, so the same completions come back whoever serves it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.generator import Generator, engine_args
from actors.prompts import Prompt
from actors.records import GroupMeta, GroupRequest, Published, SamplingParams
from actors.staleness import sample_seed
from cluster.environment import generator_env
from cluster.remote import DeadlineExceeded, get, kill

HINT = "the generator's log in the session's logs folder of Ray"


class GeneratorLost(RuntimeError):
    """Generators died more often than generator.restarts allows."""


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
    deadline: float
    actor: Any = None  # that serves it: another one once its generator was replaced
    meta_ref: Any = None
    table_ref: Any = None


class GeneratorPool:
    """`model_path`: a Hugging Face directory; `stop_token_ids` end a completion; `max_length`: context, in tokens."""

    def __init__(self, cfg: Any, model_path: str, stop_token_ids: list[int], max_length: int) -> None:
        self.cfg, self.stop = cfg, stop_token_ids
        self.args = engine_args(cfg.generator, model_path, cfg.model.dtype, max_length, cfg.generator.gpus > 0)
        self.published: Published | None = None
        self.restarts = 0
        self.actors = [self._create(i) for i in range(cfg.generator.count)]

    def _create(self, index: int) -> Any:
        g = self.cfg.generator
        env = generator_env(g.kv_cache_gib, g.gpus)
        if g.threads:
            env["OMP_NUM_THREADS"] = str(g.threads)
        name = f"generator-{index}" + (f"-{self.restarts}" if self.restarts else "")
        options = {"name": name, "num_cpus": g.cpus, "num_gpus": g.gpus, "max_concurrency": 10_000,
                   "runtime_env": {"env_vars": env}}
        return ray.remote(Generator).options(**options).remote(f"generator-{index}", self.args, self.stop)

    def start(self) -> None:
        """Until every engine answers."""
        get([a.ping.remote() for a in self.actors], self.cfg.generator.start_timeout_s, "generator: start", HINT)

    def sync(self, published: Published) -> dict[str, float]:
        """Every generator loads and proves `published`; returns the worst of each figure over the generators."""
        self.published = published
        refs = [self._load(a, published) for a in self.actors]
        found = []
        for index, ref in enumerate(refs):
            try:
                found.append(get(ref, self.cfg.generator.sync_timeout_s,
                                 f"generator-{index}: update to version {published.version}", HINT))
            except (RayActorError, DeadlineExceeded) as error:
                found.append(self.revive(index, error))
        return {k: max(f[k] for f in found) for k in found[0]}

    def _load(self, actor: Any, published: Published) -> Any:
        return actor.update_weights.remote(published.version, published.buckets, published.probe,
                                           self.cfg.generator.sync_timeout_s)

    def revive(self, index: int, why: Exception) -> dict[str, float]:
        """Replace a dead or hung generator by a new one that has proved the current weights."""
        self.restarts += 1
        if self.restarts > self.cfg.generator.restarts:
            raise GeneratorLost(f"generator-{index} was lost and generator.restarts={self.cfg.generator.restarts} are "
                                f"used up: {str(why).splitlines()[0]}. Look at {HINT}.") from why
        kill(self.actors[index])
        self.actors[index] = self._create(index)
        get(self.actors[index].ping.remote(), self.cfg.generator.start_timeout_s, f"generator-{index}: restart", HINT)
        if self.published is None:
            return {}
        return get(self._load(self.actors[index], self.published), self.cfg.generator.sync_timeout_s,
                   f"generator-{index}: update after restart", HINT)

    def stop_all(self) -> None:
        for actor in self.actors:
            kill(actor)


class Dispatcher:
    """Gives groups to the generator with the fewest of them and yields them as they finish."""

    def __init__(self, pool: GeneratorPool, run_seed: int, timeout_s: float) -> None:
        self.pool, self.run_seed, self.timeout_s = pool, run_seed, timeout_s
        self.tickets: dict[int, _Ticket] = {}  # by group id, in order of submission

    def submit(self, group_id: int, prompt: Prompt, prompt_ids: list[int], n: int, sampling: SamplingParams,
               version: int) -> None:
        """Start a group of n completions under policy `version`. Ids must be new."""
        seeds = [sample_seed(self.run_seed, prompt.prompt_id, group_id, i, version) for i in range(n)]
        request = GroupRequest(group_id, prompt.prompt_id, prompt_ids, seeds, sampling)
        load = [0] * len(self.pool.actors)
        for ticket in self.tickets.values():
            load[ticket.generator] += 1
        self._send(_Ticket(prompt, request, load.index(min(load)), 0.0))

    def _send(self, ticket: _Ticket) -> None:
        ticket.actor = self.pool.actors[ticket.generator]
        ticket.meta_ref, ticket.table_ref = ticket.actor.generate.options(num_returns=2).remote(ticket.request)
        ticket.deadline = time.monotonic() + self.timeout_s
        self.tickets[ticket.request.group_id] = ticket

    def finished(self) -> Iterator[Group]:
        """Wait until at least one group is done (or lost and given out again), and yield those that are.

        A generator that died, or that let a group's deadline pass, is replaced and its groups are given out again.
        """
        refs = {t.meta_ref: t for t in self.tickets.values()}
        wait_s = max(0.0, min(t.deadline for t in refs.values()) - time.monotonic())
        ready, _ = ray.wait(list(refs), num_returns=1, timeout=wait_s, fetch_local=False)
        if ready:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
        else:
            late = [t for t in refs.values() if t.deadline <= time.monotonic()]
            if not late:
                return  # woken a moment early
            error = DeadlineExceeded(f"generator-{late[0].generator}: group {late[0].request.group_id} not done within "
                                     f"rollout.timeout_s={self.timeout_s:g}")
            self._lost(late[0], error)
            return
        for ref in ready:
            ticket = refs[ref]
            if self.tickets.get(ticket.request.group_id) is not ticket or ticket.meta_ref is not ref:
                continue  # given out again meanwhile
            try:
                meta = ray.get(ref, timeout=self.timeout_s)
            except RayActorError as error:
                self._lost(ticket, error)
                continue
            del self.tickets[ticket.request.group_id]
            yield Group(ticket.prompt, meta, ticket.table_ref)

    def _lost(self, ticket: _Ticket, error: Exception) -> None:
        index = ticket.generator
        if self.pool.actors[index] is ticket.actor:  # else replaced already: by a sync, or for another dispatcher
            self.pool.revive(index, error)
        for other in [t for t in self.tickets.values() if t.generator == index]:
            if other.actor is not self.pool.actors[index]:
                self._send(other)
