"""Samples of a policy, with their rewards: many groups at once, and the actors for it where no policy is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from actors.data.build import build_dataset
from actors.data.prompt import Prompt
from actors.data.stream import Dataset
from actors.modeling.loading import load_tokenizer, materialise, stop_ids
from actors.records import PromptRow, SamplingParams
from actors.rollouts import Dispatcher, GeneratorPool, Group
from cluster.stopping import RunError
from conf.schema import Config, ConfigError
from learner import preflight
from learner.algorithms.assemble import Scores, read_scores
from learner.engine.group import LearnerGroup
from reward_service.client import RewardClient


@dataclass(frozen=True)
class Request:
    """`n` completions of `ids`; `prompt` says what is asked and what counts as the response's beginning (prefill)."""

    prompt: Prompt
    ids: list[int] | PromptRow
    n: int
    sampling: SamplingParams


def encode(tokenizer: Any, text: str) -> list[int]:
    """Prompt ids, with the tokens the tokenizer puts before a text (BOS) and none that it puts after."""
    ids = tokenizer(text)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def datasets(cfg: Config, tokenizer: Any) -> tuple[Dataset, list[Prompt]]:
    """(training data, held-out prompts). Raises ConfigError where the data cannot be used."""

    def count(text: str) -> int:
        return len(encode(tokenizer, text))

    try:
        train = build_dataset(cfg.data, "train", count)
        heldout = build_dataset(cfg.data, "heldout", count)
    except ValueError as error:
        raise ConfigError("data", cfg.data.kind, str(error)) from error
    return train, heldout.prompts()[: cfg.data.heldout_size]


def sample(
    dispatcher: Dispatcher,
    rewards: RewardClient,
    requests: Iterable[Request],
    first_id: int,
    version: int,
    sequences: int,
) -> tuple[list[Group], list[pa.RecordBatch]]:
    """(groups, SCORED batches) in the order of `requests`. Group ids count down from `first_id`, which is below 0.

    At most about `sequences` completions are given out at a time, so that a group's deadline covers little waiting."""
    left, at = iter(requests), {}
    groups: list[Group] = []
    while True:
        running = sum(len(t.request.seeds) for t in dispatcher.tickets.values())
        while running < sequences and (new := list(islice(left, 1))):
            r, group_id = new[0], first_id - len(at)
            at[group_id] = len(at)
            dispatcher.submit(group_id, r.prompt, r.ids, r.n, r.sampling, version)
            running += r.n
        if not dispatcher.tickets:
            break
        for group in dispatcher.finished():
            rewards.submit(group)
            groups.append(group)
    groups.sort(key=lambda g: at[g.meta.group_id])
    return groups, rewards.collect(groups)


def check_failures(cfg: Config, scores: Scores) -> None:
    """Raise RunError where more than reward.max_failure_share of the rewards are not ok."""
    share = float(np.mean(~scores.valid)) if len(scores.valid) else 0.0
    if share > cfg.reward.max_failure_share:
        i = int(np.flatnonzero(~scores.valid)[0])
        raise RunError(
            f"{share:.0%} of the rewards of this step are not ok, more than reward.max_failure_share="
            f"{cfg.reward.max_failure_share:g}. The first: status {scores.statuses[i]}, "
            f"{scores.reasons[i]}. Mend the reward or the data, or raise the bound."
        )


def in_flight(cfg: Config) -> int:
    """Completions worth having under way: what the generators batch, and as much waiting."""
    return 2 * cfg.generator.max_num_seqs * cfg.generator.count


class Engines:
    """The actors that sample the policy of `cfg.model` as it is, in stages that do not train it.

    The learner stays while they run: it owns the weights that a generator which is replaced has to load."""

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg = cfg
        self.tokenizer = load_tokenizer(cfg.model)
        self.model_path = str(materialise(cfg.model, run_dir / "initial_model", cfg.seed))
        cfg.model.path, cfg.model.init, cfg.model.gguf_file, cfg.model.tokenizer = (
            self.model_path,
            "pretrained",
            "",
            "",
        )
        self.train, self.heldout = datasets(cfg, self.tokenizer)
        self.sampled = 0  # groups

    def start(self) -> None:
        """Until the generators have proved the weights."""
        cfg = self.cfg
        if note := preflight.check_rewards(cfg, self.heldout)[1]:
            print(f"volley: note: {note}", flush=True)
        self.learner = LearnerGroup(cfg)
        self.generators = GeneratorPool(
            cfg,
            self.model_path,
            stop_ids(self.tokenizer, self.model_path),
            cfg.data.max_prompt_tokens + cfg.rollout.max_tokens,
        )
        self.rewards = RewardClient(cfg, self.model_path)
        self.learner.start()
        self.generators.start()
        self.rewards.start()
        self.generators.sync(
            self.learner.publish(0, [encode(self.tokenizer, p.text) for p in self.heldout[:4]])
        )

    def request(self, prompt: Prompt, n: int, temperature: float) -> Request:
        return Request(
            prompt,
            encode(self.tokenizer, prompt.text),
            n,
            SamplingParams(self.cfg.rollout.max_tokens, temperature),
        )

    def sample(self, requests: list[Request]) -> tuple[list[Group], list[pa.RecordBatch]]:
        """See `sample`; ids go on where the last call's ended, so that its seeds depend on the order of calls alone.
        Raises RunError where too many rewards are not ok."""
        dispatcher = Dispatcher(self.generators, self.cfg.seed, self.cfg.rollout.timeout_s)
        self.sampled += len(requests)
        first = -1 - self.sampled + len(requests)
        groups, scored = sample(dispatcher, self.rewards, requests, first, 0, in_flight(self.cfg))
        check_failures(self.cfg, read_scores(scored))
        return groups, scored

    def stop(self) -> None:
        self.rewards.stop()
        for member in self.generators.members:
            member.end()
        self.learner.stop()
