"""The stage that trains a reward model on labelled answers.

The answers are samples of the policy, graded by rule, or come from files. The trained model is a
Hugging Face folder, RUN_DIR/model.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.data.stream import PromptStream
from cluster.files import write_json
from conf.schema import Config, ConfigError
from learner.algorithms import reward_batches
from learner.algorithms.assemble import read_scores
from learner.launch import Launch
from learner.stage import Run, Stage, open_log, plain_progress
from learner.stages.engines import PolicyFiles, load_prompts, open_policy
from learner.stages.reward_answers import load_answers, save_answers
from learner.stages.reward_learner import Drawn, RewardLearner, summary_line
from learner.stages.sampling import SamplingEngines
from learner.state import State
from reward_service.models.labelled import Answers, of_samples

ANSWERS = "answers"  # in the run's folder: the labelled samples
LINE_EVERY = 10  # steps between two lines of output


@dataclass(frozen=True)
class RewardRun(Run):
    """The handles of this stage, on top of those of every stage."""

    policy: PolicyFiles
    model: RewardLearner
    answers: Answers  # to train on
    heldout: Answers
    drawn: Drawn


def build(launch: Launch, state: State, stack: ExitStack) -> RewardRun:
    """Sample or read the answers, then create the ranks that train."""
    cfg, policy = open_policy(launch.cfg, launch.run_dir)
    rm = cfg.reward_model
    source = sampled if cfg.stage.answers == "policy" else from_files
    answers, heldout = source(cfg, launch.run_dir, policy)
    model = RewardLearner(cfg, rm.init or policy.path)
    return RewardRun(
        launch=launch,
        cfg=cfg,
        log=open_log(launch, state, rm.steps, stack),
        progress=plain_progress(cfg, rm.steps),
        learner=model.group,
        policy=policy,
        model=model,
        answers=answers,
        heldout=heldout,
        drawn=model.draw(answers, None, cfg.seed),
    )


def ready(run: RewardRun, state: State, saved: Path | None) -> None:
    """Wait for the ranks, which load the checkpoint in `saved` if there is one."""
    run.learner.start(str(saved) if saved else None)


def rewind(run: RewardRun, state: State, saved: Path | None) -> None:
    """Nothing to do: the ranks are the only actors, and the loop has brought them back."""


def begin(run: RewardRun, state: State) -> None:
    """Measure the model on the held-out answers before the first step."""
    state.before = state.before or run.model.measure(run.heldout)
    print(
        f"volley: {len(run.answers)} answers to train on, {len(run.heldout)} held out; "
        f"before: {summary_line(state.before)}",
        flush=True,
    )


def step(run: RewardRun, state: State, number: int) -> None:
    """One optimizer step."""
    result = run.model.train_step(run.drawn, number)
    outcome = result["steps"][0]
    loss = result["stats"]["reward_loss"].mean
    values = {
        "reward_model/loss": loss,
        "actor/grad_norm": outcome["grad_norm"],
        "actor/lr": outcome["learning_rate"],
        "actor/skipped_steps": outcome["skipped"],
    }
    state.metrics = run.log.log(number, values)
    steps = run.cfg.reward_model.steps
    if number % LINE_EVERY == 0 or number == steps:
        print(f"volley: step {number}/{steps} loss {loss:.4f}", flush=True)


def save(run: RewardRun, state: State, folder: Path) -> None:
    """Write the tensors of a checkpoint."""
    run.learner.save_state(str(folder))


def finish(run: RewardRun, state: State) -> dict[str, Any]:
    """Measure the trained model and write it to RUN_DIR/model."""
    after = run.model.measure(run.heldout)
    measures = {f"reward_model/heldout/{k}": v for k, v in after.items() if v is not None}
    run.log.log(run.cfg.reward_model.steps, measures)
    run.learner.save_model(str(run.launch.run_dir / "model"), run.policy.tokenizer)
    return after


def conclude(run: RewardRun, state: State, after: dict[str, Any], setup_s: float) -> None:
    """Write summary.json, and say how good the model is."""
    run.log.close()
    cfg, run_dir = run.cfg, run.launch.run_dir
    summary = {
        "experiment": cfg.experiment,
        "seed": cfg.seed,
        "kind": cfg.reward_model.kind,
        "loss": cfg.reward_model.loss,
        "steps": cfg.reward_model.steps,
        "answers": len(run.answers),
        "heldout_answers": len(run.heldout),
        "heldout_ends": sum(map(len, run.heldout.ends)),
        "before": state.before,
        "after": after,
        "wall_s": round(time.monotonic() - run.launch.started, 1),
    }
    write_json(run_dir / "summary.json", summary)
    print(
        f"volley: held out: {summary_line(after)}\n"
        f"volley: done in {summary['wall_s']:.0f} s; the model is in {run_dir / 'model'}",
        flush=True,
    )


# ---- where the answers come from -----------------------------------------------------------------


def sampled(cfg: Config, run_dir: Path, policy: PolicyFiles) -> tuple[Answers, Answers]:
    """(to train on, held out): samples of the policy, graded by reward.rules.

    They are kept in RUN_DIR/answers, and read from there where the run is resumed.
    """
    files = {side: run_dir / ANSWERS / f"{side}.parquet" for side in ("train", "heldout")}
    if not all(f.is_file() for f in files.values()):
        sampler = SamplingEngines.create(cfg, policy, *load_prompts(cfg, policy))
        sampler.start()
        stream = PromptStream(sampler.train, cfg.seed)
        prompts = {"train": stream.next(cfg.reward_model.prompts), "heldout": sampler.heldout}
        first_id = -1
        for side, chosen in prompts.items():
            save_answers(files[side], sample_answers(sampler, chosen, side, first_id), 0)
            first_id -= len(chosen)
        sampler.stop()
    train, heldout = (
        load_answers(str(files[s]), policy.tokenizer, cfg) for s in ("train", "heldout")
    )
    return train, heldout


def sample_answers(
    sampler: SamplingEngines, prompts: list[Any], side: str, first_id: int
) -> Answers:
    """Labelled samples of these prompts. Raises ConfigError where none of them is of use."""
    cfg, r = sampler.cfg, sampler.cfg.rollout
    requests = [sampler.request(p, r.group_size, r.temperature) for p in prompts]
    groups, scored = sampler.sample(requests, first_id)
    answers = of_samples(
        [g.meta for g in groups],
        [g.table for g in groups],
        read_scores(scored).accuracy,
        cfg.reward_model.loss == "pairwise",
    )
    if not len(answers):
        raise ConfigError(
            "reward_model.prompts",
            cfg.reward_model.prompts,
            f"none of the {side} samples is of use: accuracy graded none of them "
            "(pairwise: no group has right and wrong ones)",
        )
    return answers


def from_files(cfg: Config, run_dir: Path, policy: PolicyFiles) -> tuple[Answers, Answers]:
    """(to train on, held out): reward_model.path, and heldout_path or a share of its prompts."""
    rm = cfg.reward_model
    whole = load_answers(rm.path, policy.tokenizer, cfg)
    if rm.heldout_path:
        return whole, load_answers(rm.heldout_path, policy.tokenizer, cfg)
    held = reward_batches.held_out(whole.prompt_ids, rm.heldout_share)
    if held.all() or not held.any():
        raise ConfigError(
            "reward_model.heldout_share",
            rm.heldout_share,
            f"{int(held.sum())} of {len(whole)} answers would be held out",
            "Use more prompts, or give reward_model.heldout_path.",
        )
    return whole.take((~held).nonzero()[0]), whole.take(held.nonzero()[0])


STAGE = Stage(
    name="reward_model",
    inputs={"model": "model.path", "answers": "reward_model.path"},
    outputs={"model": "model"},
    build=build,
    ready=ready,
    rewind=rewind,
    steps=lambda run: run.cfg.reward_model.steps,
    begin=begin,
    step=step,
    save=save,
    finish=finish,
    conclude=conclude,
)
