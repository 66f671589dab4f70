"""The reward-model pool: actors that score finished groups, token in, token out.

Whatever waits when an actor becomes free is scored together, in micro-batches of
reward_model.batch_tokens. An actor that dies or hangs is replaced, by one with the newest models,
and what it had not answered is given to that.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from actors.records import ragged
from cluster import placement
from cluster.environment import process_env
from cluster.supervision.pool import Pool
from cluster.supervision.remote import get
from cluster.supervision.supervisor import Supervised
from conf.schema import ConfigError
from reward_service.combine import ModelScore
from reward_service.models.meaning import NEW, meaning
from reward_service.models.scoring import judge
from reward_service.step_labels.steps import step_ends

HINT = "the reward model actor's log in the session's logs folder of Ray"
Verdicts = list[dict[str, ModelScore]]  # a row of the group each, by name of the model


@dataclass
class _Waiting:
    """A group that waits to be scored: its ROLLOUT table and the prefill of its prompt."""

    table: pa.RecordBatch
    prefill: str
    future: Future


class RewardModelActor:
    """A Ray actor (asyncio) that holds every reward model and scores groups of answers.

    `paths` maps the name of each model to its folder, its hub id, or NEW. `policy` is the folder of
    the policy's initial model. One thread scores; whatever waits when it becomes free is scored
    together.
    """

    def __init__(self, index: int, cfg: Any, paths: dict[str, str], policy: str) -> None:
        import torch
        from transformers import AutoTokenizer

        self.index, self.cfg, self.policy = index, cfg, policy
        torch.set_num_threads(max(1, cfg.reward_model.threads))
        self.device = "cuda" if cfg.reward_model.gpus else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(policy, local_files_only=True)
        self.models: dict[str, Any] = {}
        for name, path in paths.items():
            self._load(name, path)
        # Entries are groups (_Waiting), a (function, future), or None, which wakes the thread.
        self._queue: queue.Queue = queue.Queue()
        self._pings: queue.Queue[Future] = queue.Queue()
        threading.Thread(target=self._loop, name="scoring", daemon=True).start()

    def __repr__(self) -> str:
        return f"reward-model-{self.index}"

    async def score(self, table: pa.RecordBatch, prefill: str) -> Verdicts:
        """The scores of every model for each row of a ROLLOUT batch.

        `prefill` is the beginning of the response that is part of the prompt.
        """
        return await self._ask(partial(_Waiting, table, prefill))

    async def load(self, name: str, path: str) -> str:
        """Replaces a model by the one at `path`; groups submitted before keep the old model."""
        return await self._ask(lambda future: (partial(self._load, name, path), future))

    async def ping(self) -> int:
        """The index of this actor. The scoring thread answers between two micro-batches."""
        future: Future = Future()
        self._pings.put(future)
        self._queue.put(None)
        return await asyncio.wrap_future(future)

    async def _ask(self, entry: Callable[[Future], Any]) -> Any:
        future: Future = Future()
        self._queue.put(entry(future))
        return await asyncio.wrap_future(future)

    def _loop(self) -> None:
        """Runs the scoring thread: takes all waiting entries and handles them in order."""
        while True:
            entries = [self._queue.get()]
            while not self._queue.empty():
                entries.append(self._queue.get())
            self._pong()
            groups: list[_Waiting] = []
            for entry in filter(None, entries):
                if isinstance(entry, _Waiting):
                    groups.append(entry)
                    continue
                self._answer(groups)
                groups = []
                function, future = entry
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 - belongs to the caller
                    future.set_exception(error)
            self._answer(groups)

    def _pong(self) -> None:
        """Answers all waiting pings."""
        while not self._pings.empty():  # no other thread takes from it
            self._pings.get().set_result(self.index)

    def _answer(self, groups: list[_Waiting]) -> None:
        """Scores the groups together and sets the result of each."""
        try:
            verdicts = self._judge(groups) if groups else []
            for group in groups:
                n = group.table.num_rows
                group.future.set_result(verdicts[:n])
                verdicts = verdicts[n:]
        except Exception as error:  # noqa: BLE001 - belongs to the callers
            for group in groups:
                if not group.future.done():
                    group.future.set_exception(error)

    def _judge(self, groups: list[_Waiting]) -> Verdicts:
        """The scores of every model for the rows of all groups, in order."""
        prompts, completions = (
            [ids for g in groups for ids in ragged(g.table.column(c))]
            for c in ("prompt_ids", "completion_ids")
        )
        scores_by_model: dict[str, list[ModelScore]] = {}
        for name, (model, how) in self.models.items():
            ends: list[list[int]] = [[]] * len(completions)
            if how.kind == "process":
                prefills = [g.prefill for g in groups for _ in range(g.table.num_rows)]
                ends = [
                    self._ends(how.steps or self.cfg.data.steps, p, c.tolist())
                    for p, c in zip(prefills, completions, strict=True)
                ]
            scores_by_model[name] = judge(
                model,
                how,
                prompts,
                completions,
                ends,
                self.cfg.reward_model.batch_tokens,
                self.device,
                self._pong,
            )
        return [
            {name: scores[i] for name, scores in scores_by_model.items()}
            for i in range(len(completions))
        ]

    def _ends(self, steps: str, prefill: str, ids: list[int]) -> list[int]:
        """The index of the last token of each step of a completion."""

        def decode(part: list[int]) -> str:
            return self.tokenizer.decode(
                part, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

        self._pong()  # Splitting thousands of tokens takes seconds.
        return step_ends(steps, prefill, decode(ids), ids, decode) if ids else []

    def _load(self, name: str, path: str) -> str:
        from reward_service.models.heads import load_reward_model

        place, rm = self.policy if path == NEW else path, self.cfg.reward_model
        model = load_reward_model(
            place,
            self.cfg.model.dtype,
            path != NEW,
            rm.head,
            rm.beta,
            self.cfg.learner.logprob_chunk_tokens,
        )
        self.models[name] = (
            model.to(self.device).eval(),
            meaning(place, self.cfg.reward.models[name]),
        )
        return place


class RewardModelPool(Pool):
    """The reward-model actors. Each holds every model, and a group is scored by one of them.

    `policy`: folder of the policy's initial model, whose tokenizer every reward model must
    share."""

    def __init__(self, cfg: Any, policy: str) -> None:
        self.cfg, self.policy = cfg, policy
        self.paths = {name: whole(str(m["path"])) for name, m in cfg.reward.models.items()}
        for name, path in self.paths.items():
            check_vocabulary(name, path, policy)
        super().__init__(
            [
                Supervised(
                    f"reward-model-{i}",
                    partial(self._create, i),
                    cfg.cluster,
                    "cluster.restarts",
                    cfg.cluster.restarts,
                    cfg.reward_model.timeout_s,
                    HINT,
                    lambda actor: actor.ping.remote(),
                )
                for i in range(cfg.reward_model.count)
            ]
        )

    def _create(self, index: int, suffix: str) -> list[Any]:
        rm = self.cfg.reward_model
        env = process_env(rm.gpus) | {"OMP_NUM_THREADS": str(max(1, rm.threads))}
        actor = ray.remote(RewardModelActor).options(
            name=f"reward-model-{index}{suffix}",
            max_concurrency=10_000,
            runtime_env={"env_vars": env},
            **placement.options(self.cfg, "reward_model", index),
        )
        return [actor.remote(index, self.cfg, dict(self.paths), self.policy)]

    def catch_up(self, index: int) -> None:
        """Wait until the new actor's scoring thread answers. The actor has loaded the newest models
        by then."""
        member = self.members[index]
        get(member.actor.ping.remote(), self.cfg.reward_model.timeout_s, member.name, HINT)

    def submit(self, group: Any) -> None:
        """Start to score a finished group (actors.rollouts.Group), on the actor with the fewest
        completions waiting."""
        waiting = dict.fromkeys(range(len(self.members)), 0)
        for work in self.unanswered.values():
            waiting[work.member] += len(work.subject.meta.lengths)
        self.give(
            group.meta.group_id,
            min(waiting, key=waiting.__getitem__),
            lambda actor: actor.score.remote(group.table, group.prompt.prefill),
            group,
        )

    def collect(self, group_id: int) -> Verdicts:
        """Return the verdicts on a submitted group, once they exist."""
        index = self.unanswered[group_id].member
        operation = f"{self.members[index].name}: group {group_id}"
        return super().collect(group_id, self._limit_s(index), operation)

    def load(self, name: str, path: str) -> None:
        """Replace a model by the one at `path` in every actor, and in those that are started
        later."""
        self.paths[name] = path
        refs = [member.actor.load.remote(name, path) for member in self.members]
        for index, ref in enumerate(refs):
            self.answer(index, ref, self._limit_s(index), f"load {name}")

    def _limit_s(self, index: int) -> float:
        """Return how many seconds a member has for all of its unanswered work: timeout_s for each
        micro-batch of it. That the member hangs shows sooner, in its pings."""
        rm = self.cfg.reward_model
        metas = [w.subject.meta for w in self.unanswered.values() if w.member == index]
        tokens = sum(int(m.lengths.sum()) + m.prompt_tokens * len(m.lengths) for m in metas)
        return rm.timeout_s * (1 + tokens / rm.batch_tokens)


def whole(path: str) -> str:
    """A local folder as an absolute path, because actors run elsewhere; a hub id or NEW as is."""
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path


def check_vocabulary(name: str, path: str, policy: str) -> None:
    """Raise ConfigError where the model at `path` numbers its tokens otherwise than the policy,
    whose ids it is given. A model without a tokenizer of its own must have as many rows as the
    policy."""
    from transformers import AutoConfig, AutoTokenizer

    if path == NEW:
        return
    key, cure = (
        f"reward.models.{name}.path",
        "Token in, token out: use a reward model with the policy's tokenizer.",
    )
    try:
        theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False).get_vocab()
    except (OSError, ValueError):
        rows, ours = (
            AutoConfig.from_pretrained(p, trust_remote_code=False).vocab_size
            for p in (path, policy)
        )
        if rows != ours:
            raise ConfigError(key, path, f"has {rows} token ids, the policy {ours}", cure) from None
        return
    ours = AutoTokenizer.from_pretrained(policy, local_files_only=True).get_vocab()
    other = sorted(t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t))
    if other:
        raise ConfigError(
            key,
            path,
            f"{len(other)} tokens differ from the policy's, such as {other[0]!r} ("
            f"{theirs.get(other[0])}, the policy {ours.get(other[0])})",
            cure,
        )
