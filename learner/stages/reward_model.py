"""Training a reward model: stage=reward_model, and the refreshes of iterative RL (learner/stages/iterative.py).

Labelled answers are samples of the policy, graded by rule, or files. Their tokens stay in the object store: reading and
writing them is done by Ray tasks, training by RewardRanks; here are scalars (DESIGN invariant 8).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from actors.modeling.loading import load_tokenizer, materialise
from cluster.stopping import Stopping
from cluster.supervision.failures import LearnerLost
from cluster.supervision.remote import get
from cluster.supervision.supervisor import tell
from conf.schema import Config, ConfigError
from learner.algorithms import reward_training
from learner.algorithms.schedule import learning_rate
from learner.checkpoints import checkpoint
from learner.engine import reward_rank
from learner.engine.group import LearnerGroup
from reward_service.models.labelled import Answers, of_record, of_samples, read, record

FILES_S = 600.0  # deadline of reading or writing a file of answers
HINT = "the logs of Ray's workers in the session's logs folder of Ray"
SHOWN = ("auc", "accuracy", "loss", "brier", "calibration_error")


class RewardLearner:
    """The ranks that train one reward model, which begins as `path` (a causal LM or a reward model)."""

    def __init__(self, cfg: Config, path: str) -> None:
        self.cfg, self.model = cfg.reward_model, path
        self.settings = reward_rank.settings(cfg, path)
        self.group = LearnerGroup(self.settings, reward_rank.RewardRank, "reward_learner")

    def fit(
        self,
        fresh: Answers,
        old: Answers | None,
        seed: int,
        begin: int = 0,
        each: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> None:
        """reward_model.steps optimizer steps, from step `begin` on, on answers of this iteration and a share of `old`
        ones. `each(step, result)` is told of every step, counted from 1. Raises LearnerLost: start anew."""
        rm, lr = self.cfg, self.settings.learner
        answers = fresh + old if old else fresh
        pool = reward_training.units(answers, rm.loss)
        count = len(reward_training.units(fresh, rm.loss))
        drawn = reward_training.draw(count, len(pool) - count, rm.batch, rm.steps, rm.replay, seed)
        for step in range(begin, rm.steps):
            job = reward_training.make_job(
                answers,
                [pool[i] for i in drawn[step]],
                rm.loss,
                lr.ranks,
                lr.micro_batch_tokens,
                step,
                learning_rate(self.settings.optimizer, step, rm.steps),
            )
            result = self.group.update(job)
            if each:
                each(step + 1, result)

    def measure(self, answers: Answers) -> dict[str, float | None]:
        """training.measure of the model as it is, on these answers."""
        lr = self.settings.learner
        job = reward_training.make_job(
            answers,
            reward_training.units(answers, "pointwise"),
            "pointwise",
            lr.ranks,
            lr.micro_batch_tokens,
        )
        found = dict(self.group.score(job))
        return reward_training.measure(
            [found[i] for i in range(len(answers))], answers, self.cfg.loss
        )


# ---- files of answers ----------------------------------------------------------------------------------------


def save_answers(file: Path, answers: Answers, iteration: int) -> None:
    """Write them as one Parquet file of LABELLED, beside and then renamed."""
    get(_write.remote(str(file), answers, iteration), FILES_S, f"writing {file}", HINT)


def load_answers(path: str, tokenizer: Any, cfg: Config) -> Answers:
    """Of a file or folder; those over learner.micro_batch_tokens or the model's context are left out, and told."""
    rm = cfg.reward_model
    limit = cfg.learner.micro_batch_tokens // (2 if rm.loss == "pairwise" else 1)
    limit = min(limit, tokenizer.model_max_length)
    scalars, table = _read.remote(path, tokenizer, rm.label, limit)
    answers, dropped = get(scalars, FILES_S, f"reading {path}", HINT)
    if dropped:
        tell(f"{dropped} answers of {path} are left out: over {limit} tokens")
    return replace(answers, tables=[table])


@ray.remote(num_cpus=0)
def _write(file: str, answers: Answers, iteration: int) -> int:
    batch = record(answers, ray.get(answers.tables, timeout=FILES_S), iteration)
    there = Path(file)
    there.parent.mkdir(parents=True, exist_ok=True)
    beside = there.with_suffix(".partial")
    pq.write_table(pa.Table.from_batches([batch]), beside)
    beside.rename(there)
    return batch.num_rows


@ray.remote(num_cpus=0, num_returns=2)
def _read(
    path: str, tokenizer: Any, label: str, max_tokens: int
) -> tuple[tuple[Answers, int], pa.RecordBatch]:
    batch, dropped = read(path, tokenizer, label, max_tokens)
    return (of_record(batch, None), dropped), batch


# ---- stage=reward_model --------------------------------------------------------------------------------------


def train(
    cfg: Config, run_dir: Path, stopping: Stopping, store: checkpoint.Store, saved: Path | None
) -> None:
    """Train for reward_model.steps, measure on held-out answers before and after, and write run_dir/model."""
    from cluster.monitoring.metrics import MetricLog

    began = time.monotonic()
    tokenizer = load_tokenizer(cfg.model)
    initial = str(materialise(cfg.model, run_dir / "initial_model", cfg.seed))
    fresh, heldout = (sampled if cfg.reward_model.source == "policy" else from_files)(
        cfg, run_dir, tokenizer
    )
    state = (
        json.loads((saved / checkpoint.STATE).read_text())
        if saved
        else {"done": 0, "before": {}, "wandb_id": None}
    )
    learner = RewardLearner(cfg, cfg.reward_model.init or initial)
    learner.group.start(str(saved) if saved else None)
    log = MetricLog(
        run_dir,
        wandb=cfg.logging.wandb,
        wandb_project=cfg.logging.wandb_project,
        ray_metrics=cfg.logging.ray_metrics,
        wandb_id=state["wandb_id"],
        settings=checkpoint.as_dict(cfg),
        run_meta={"experiment": cfg.experiment, "seed": cfg.seed, "steps": cfg.reward_model.steps},
        resume_step=state["done"] or None,
    )
    try:
        before = state["before"] or learner.measure(heldout)
        print(
            f"volley: {len(fresh)} answers to train on, {len(heldout)} held out; before: {shown(before)}",
            flush=True,
        )
        stage = _Stage(cfg, learner, log, stopping, store, before)
        stage.run(fresh, state["done"])
        after = learner.measure(heldout)
        log.log(
            cfg.reward_model.steps,
            {f"reward_model/heldout/{k}": v for k, v in after.items() if v is not None},
        )
        learner.group.save_model(str(run_dir / "model"), tokenizer)
    finally:
        log.close()
    summary = {
        "experiment": cfg.experiment,
        "seed": cfg.seed,
        "kind": cfg.reward_model.kind,
        "loss": cfg.reward_model.loss,
        "steps": cfg.reward_model.steps,
        "answers": len(fresh),
        "heldout_answers": len(heldout),
        "heldout_ends": sum(map(len, heldout.ends)),
        "before": before,
        "after": after,
        "wall_s": round(time.monotonic() - began, 1),
    }
    beside = run_dir / "summary.json.partial"
    beside.write_text(json.dumps(summary, indent=1) + "\n")
    beside.rename(run_dir / "summary.json")
    print(
        f"volley: held out: {shown(after)}\nvolley: done in {summary['wall_s']:.0f} s; the model is in "
        f"{run_dir / 'model'}",
        flush=True,
    )


class _Stage:
    """The steps of one training, with its checkpoints; a learner that is lost goes back to the last of them."""

    def __init__(
        self,
        cfg: Config,
        learner: RewardLearner,
        log: Any,
        stopping: Stopping,
        store: checkpoint.Store,
        before: dict[str, Any],
    ) -> None:
        self.cfg, self.learner, self.log, self.stopping, self.store = (
            cfg,
            learner,
            log,
            stopping,
            store,
        )
        self.state = {
            "before": before,
            "config": checkpoint.as_dict(cfg),
            "wandb_id": log.wandb_id,
            "metrics": {},
        }

    def run(self, fresh: Answers, begin: int) -> None:
        self.stopping.gently = True
        while True:
            try:
                self.learner.fit(fresh, None, self.cfg.seed, begin, self.step)
                break
            except LearnerLost as error:
                saved = self.store.newest(lambda text: tell(text))
                begin = json.loads((saved / checkpoint.STATE).read_text())["done"] if saved else 0
                self.learner.group.revive(error, str(saved) if saved else None)
                self.log.rewind(begin)
                tell(f"going on after step {begin}")
        self.stopping.gently = False

    def step(self, step: int, result: dict[str, Any]) -> None:
        rm, every, outcome = self.cfg.reward_model, self.cfg.checkpoint.every, result["steps"][0]
        loss = result["stats"]["reward_loss"].mean
        self.log.log(
            step,
            {
                "reward_model/loss": loss,
                "actor/grad_norm": outcome["grad_norm"],
                "actor/lr": outcome["learning_rate"],
                "actor/skipped_steps": outcome["skipped"],
            },
        )
        if step % 10 == 0 or step == rm.steps:
            print(f"volley: step {step}/{rm.steps} loss {loss:.4f}", flush=True)
        stop = self.stopping.is_set()
        if stop or (every and step % every == 0 and step < rm.steps):
            self.store.write(
                step,
                self.state | {"done": step},
                lambda folder: self.learner.group.save_state(str(folder)),
                self.cfg.checkpoint,
            )
        if stop:
            raise KeyboardInterrupt


def sampled(cfg: Config, run_dir: Path, tokenizer: Any) -> tuple[Answers, Answers]:
    """(train, held out): samples of the policy, graded by reward.rules; they are kept in RUN_DIR/answers."""
    from actors.data.stream import PromptStream
    from learner.algorithms.assemble import read_scores
    from learner.stages.sampling import Engines

    files = {side: run_dir / "answers" / f"{side}.parquet" for side in ("train", "heldout")}
    if not all(f.is_file() for f in files.values()):
        r = cfg.rollout
        engines = Engines(cfg, run_dir)
        engines.start()
        prompts = {
            "train": PromptStream(engines.train, cfg.seed).next(cfg.reward_model.prompts),
            "heldout": engines.heldout,
        }
        for side, chosen in prompts.items():
            groups, scored = engines.sample(
                [engines.request(p, r.group_size, r.temperature) for p in chosen]
            )
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
                    f"none of the {side} samples is of "
                    "use: accuracy graded none of them (pairwise: no group has right and wrong ones)",
                )
            save_answers(files[side], answers, 0)
        engines.stop()
    return tuple(load_answers(str(files[side]), tokenizer, cfg) for side in ("train", "heldout"))


def from_files(cfg: Config, run_dir: Path, tokenizer: Any) -> tuple[Answers, Answers]:
    """(train, held out) of reward_model.path, and of heldout_path or a share of the same prompts."""
    rm = cfg.reward_model
    whole = load_answers(rm.path, tokenizer, cfg)
    if rm.heldout_path:
        return whole, load_answers(rm.heldout_path, tokenizer, cfg)
    apart = reward_training.held_out(whole.prompt_ids, rm.heldout_share)
    if apart.all() or not apart.any():
        raise ConfigError(
            "reward_model.heldout_share",
            rm.heldout_share,
            f"{int(apart.sum())} of {len(whole)} answers would be held out",
            "Use more prompts, or give reward_model.heldout_path.",
        )
    return whole.take((~apart).nonzero()[0]), whole.take(apart.nonzero()[0])


def shown(found: dict[str, float | None]) -> str:
    return ", ".join(f"{k} {found[k]:.3f}" for k in SHOWN if found.get(k) is not None)
