"""Evaluation on the held-out prompts, and samples of the policy that are not trained on."""

from __future__ import annotations

import time
from typing import Any

from actors.data.prompt import Prompt
from actors.records import SamplingParams
from actors.rollouts import Dispatcher
from learner.evaluation.step_metrics import evaluation
from learner.stages.engines import Request, in_flight, sample
from learner.stages.rl.batch import Batch, ScoredGroup
from learner.stages.rl.run import RLRun
from learner.state import State

FIRST_ID = -1_000_000  # group ids count down from here, apart from those of training


def sample_policy(
    run: RLRun, state: State, prompts: list[Prompt], n: int, temperature: float
) -> Batch:
    """`n` completions of each prompt with their rewards, in the order of the prompts."""
    cfg = run.cfg
    requests = [
        Request(
            p, run.policy.encode(p.text), n, SamplingParams(cfg.rollout.max_tokens, temperature)
        )
        for p in prompts
    ]
    first = FIRST_ID - state.evaluations - 1
    state.evaluations += len(prompts)
    dispatcher = Dispatcher(run.generators, cfg.seed, cfg.rollout.timeout_s)
    groups, scored = sample(dispatcher, run.rewards, requests, first, state.version, in_flight(cfg))
    return Batch(tuple(ScoredGroup(g, s) for g, s in zip(groups, scored, strict=True)))


def evaluate(run: RLRun, state: State, step: int, samples: int) -> dict[str, Any]:
    """pass@k, maj@k, format and length on the held-out prompts, at evaluation.temperature."""
    began = time.monotonic()
    batch = sample_policy(run, state, run.data.heldout, samples, run.cfg.evaluation.temperature)
    measures = evaluation(batch.groups, batch.scores, samples, list(run.cfg.reward.models))
    known = {name: value for name, value in measures.items() if value is not None}
    state.metrics |= run.log.log(step, {f"eval/{name}": v for name, v in known.items()})
    state.evaluated = step
    known["seconds"] = measures["seconds"] = time.monotonic() - began
    run.progress.note("held out: " + ", ".join(f"{name} {v:.3g}" for name, v in known.items()))
    return measures


def evaluate_if_due(run: RLRun, state: State) -> None:
    """The evaluation of the step just done.

    It comes before its checkpoint, which holds its figures.
    """
    every = run.cfg.evaluation.every
    if every and state.evaluated < state.done < run.cfg.steps and state.done % every == 0:
        evaluate(run, state, state.done, run.cfg.evaluation.samples_during)
