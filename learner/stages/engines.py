"""The engines that sample a policy: its weights in a learner, generators, and the rewards.

Reinforcement learning trains the policy between samples; other stages only sample it. The learner
is there either way, because a generator that is replaced has to load the weights again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from actors.data.build import build_dataset
from actors.data.prompt import Prompt
from actors.data.stream import Dataset
from actors.modeling.loading import load_tokenizer, materialise, model_size, stop_ids
from actors.records import PromptRow, SamplingParams
from actors.rollouts import Dispatcher, GeneratorPool, Group
from cluster.plan import ModelSize
from cluster.stopping import RunError
from conf.schema import Config, ConfigError
from learner.algorithms.assemble import Scores
from learner.engine.group import LearnerGroup
from learner.preflight import rewards as preflight_rewards
from reward_service.client import RewardClient

PROBE_PROMPTS = 4  # held-out prompts by which the first weights of the generators are proved


@dataclass(frozen=True)
class PolicyFiles:
    """The model that a run begins with: a plain Hugging Face folder, and its tokenizer."""

    path: str
    tokenizer: Any
    size: ModelSize

    def encode(self, text: str) -> list[int]:
        """Prompt ids, with the tokens the tokenizer puts before a text (BOS) and none after it."""
        return encode(self.tokenizer, text)


@dataclass(frozen=True)
class Request:
    """`n` completions of the prompt ids `ids`.

    `prompt` says what is asked, and which prefill counts as the beginning of the response.
    """

    prompt: Prompt
    ids: list[int] | PromptRow
    n: int
    sampling: SamplingParams


def encode(tokenizer: Any, text: str) -> list[int]:
    """Prompt ids, with the tokens the tokenizer puts before a text (BOS) and none after it."""
    ids = tokenizer(text)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def open_policy(cfg: Config, run_dir: Path) -> tuple[Config, PolicyFiles]:
    """The settings with the model as a local folder, which every actor reads, and its files."""
    tokenizer = load_tokenizer(cfg.model)
    path = str(materialise(cfg.model, run_dir / "initial_model", cfg.seed))
    model = replace(cfg.model, path=path, init="pretrained", gguf_file="", tokenizer="")
    return replace(cfg, model=model), PolicyFiles(path, tokenizer, model_size(model))


def load_prompts(cfg: Config, policy: PolicyFiles) -> tuple[Dataset, list[Prompt]]:
    """The training data and the held-out prompts.

    Raises ConfigError where the data cannot be used.
    """

    def count_tokens(text: str) -> int:
        return len(policy.encode(text))

    try:
        train = build_dataset(cfg.data, "train", count_tokens)
        heldout = build_dataset(cfg.data, "heldout", count_tokens)
    except ValueError as error:
        raise ConfigError("data", cfg.data.kind, str(error)) from error
    return train, heldout.prompts()[: cfg.data.heldout_size]


def check_rewards(cfg: Config, heldout: list[Prompt]) -> None:
    """Check that the rewards accept the reference answers of held-out prompts.

    Prints what is worth knowing. Raises PreflightError where the rewards do not fit the data.
    """
    if note := preflight_rewards.check_rewards(cfg, heldout)[1]:
        print(f"volley: note: {note}", flush=True)


def create_learner(cfg: Config) -> LearnerGroup:
    """The ranks that hold the policy. Their actors are created, and not waited for."""
    return LearnerGroup(cfg)


def create_generators(cfg: Config, policy: PolicyFiles) -> GeneratorPool:
    """The pool of generators. Its actors are created, and not waited for."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    stops = stop_ids(policy.tokenizer, policy.path)
    return GeneratorPool(cfg, policy.path, stops, longest)


def probe_of(policy: PolicyFiles, heldout: list[Prompt]) -> list[list[int]]:
    """Prompts as ids: the sequences by which the first weights of the generators are proved."""
    return [policy.encode(p.text) for p in heldout[:PROBE_PROMPTS]]


def training_sampling(cfg: Config) -> SamplingParams:
    """How completions are drawn that are trained on."""
    r = cfg.rollout
    return SamplingParams(r.max_tokens, r.temperature, r.top_p, r.top_k)


def sample(
    dispatcher: Dispatcher,
    rewards: RewardClient,
    requests: Iterable[Request],
    first_id: int,
    version: int,
    sequences: int,
) -> tuple[list[Group], list[pa.RecordBatch]]:
    """Groups and their SCORED batches, in the order of `requests`.

    Group ids count down from `first_id`, which is below 0. At most about `sequences` completions
    are given out at a time, so that a group's deadline covers little waiting.
    """
    left, position_of = iter(requests), {}
    groups: list[Group] = []
    while True:
        running = sum(len(t.request.seeds) for t in dispatcher.tickets.values())
        while running < sequences and (next_one := list(islice(left, 1))):
            request, group_id = next_one[0], first_id - len(position_of)
            position_of[group_id] = len(position_of)
            dispatcher.submit(
                group_id, request.prompt, request.ids, request.n, request.sampling, version
            )
            running += request.n
        if not dispatcher.tickets:
            break
        for group in dispatcher.finished():
            rewards.submit(group)
            groups.append(group)
    groups.sort(key=lambda g: position_of[g.meta.group_id])
    return groups, rewards.collect(groups)


def check_failures(cfg: Config, scores: Scores) -> None:
    """Raise RunError where more than reward.max_failure_share of the rewards are not ok."""
    share = float(np.mean(~scores.valid)) if len(scores.valid) else 0.0
    if share > cfg.reward.max_failure_share:
        i = int(np.flatnonzero(~scores.valid)[0])
        raise RunError(
            f"{share:.0%} of the rewards of this step are not ok, more than "
            f"reward.max_failure_share={cfg.reward.max_failure_share:g}. The first: "
            f"status {scores.statuses[i]}, "
            f"{scores.reasons[i]}. Mend the reward or the data, or raise the bound."
        )


def in_flight(cfg: Config) -> int:
    """How many completions to keep under way: what the generators batch, and as much waiting."""
    return 2 * cfg.generator.max_num_seqs * cfg.generator.count
