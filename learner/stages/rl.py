"""The trainer: the only module that knows the order of things. `Trainer.step` is the loop, on one screen.

prompts -> rollouts -> rewards -> advantages -> loss -> weights -> (back to rollouts)
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from actors.data.given import COLUMNS, given_group
from actors.data.prompts import Prompt
from actors.data.sampler import Sampler
from actors.modeling.loading import load_tokenizer, materialise, model_size, stop_ids
from actors.records import SamplingParams
from actors.reference import ReferencePool
from actors.rollout_log import RolloutLog
from actors.rollouts import Dispatcher, GeneratorPool, Group
from actors.staleness import Ledger, admissible
from cluster import plan
from cluster.connect import store_shortage
from cluster.monitoring.metrics import MetricLog, flatten
from cluster.monitoring.progress import Progress
from cluster.monitoring.stat import Stat
from cluster.stopping import RunError, Stopping
from cluster.supervision.failures import LearnerLost
from conf.schema import Config
from learner import preflight
from learner.algorithms import regimes
from learner.algorithms.assemble import Assembled, Scores, alive, assemble, read_scores
from learner.algorithms.schedule import learning_rate
from learner.checkpoints import checkpoint, resume
from learner.engine.diagnostics import diagnostics_for
from learner.engine.group import LearnerGroup
from learner.engine.job import UpdateJob
from learner.evaluation import guards
from learner.evaluation.step_metrics import evaluation, step_metrics
from learner.reports import summary
from learner.stages.iterative import Refresher
from learner.stages.sampling import Request, check_failures, datasets, encode, in_flight, sample
from reward_service.client import RewardClient

EVALUATION_IDS = (
    -1_000_000
)  # group ids of evaluations count down from here, apart from those of training


class Trainer:
    """Owns the actors of one run. `started`: time.monotonic() when the program began (for setup_s); `stopping`: set by
    SIGTERM: finish the step, write a checkpoint, go. `saved`: the checkpoint to go on from, a verified folder."""

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        started: float,
        stopping: Stopping,
        store: checkpoint.Store,
        saved: Path | None,
    ) -> None:
        self.cfg, self.run_dir, self.started, self.stopping = cfg, run_dir, started, stopping
        self.store, self.saved = store, saved
        self.settings = checkpoint.as_dict(cfg)  # as given
        self.done = 0  # steps
        self.before: dict[str, Any] = {}
        self.version = 0
        self.optimizer_steps = 0
        self.timing: dict[str, float] = {}
        self.refused = 0  # groups of this step that no generator took
        self.ledger = Ledger()
        self.queue: list[Group] = []  # finished, oldest first, not yet trained
        self.given: dict[int, Any] = {}  # scores of groups whose answers were given (SFT, DPO)
        self.warned: dict[str, Any] = {}  # state of the guards
        self.evaluations = 0  # prompts evaluated so far
        self.evaluated = 0  # the last step with an evaluation
        self.measured: dict[str, float] = {}  # what this step wrote into the metrics
        self.tokens = 0
        self.generating_s = 0.0
        self.worst_mismatch = 0.0
        self.reference_reset_at = (
            0  # the step after which the reference became the policy; 0: it is the initial model
        )

    # ---- the run ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.train()
        finally:
            if hasattr(self, "log"):
                self.log.close()

    def train(self) -> None:
        cfg = self.cfg
        self.start()
        setup_s = time.monotonic() - self.started
        with Progress(
            cfg.steps, cfg.logging.progress, cfg.experiment, done=self.done
        ) as self.progress:
            self.progress.note(f"engines ready after {setup_s:.0f} s")
            lost = None
            while True:
                try:
                    if lost:
                        self.fall_back(lost)
                    after = self.go_on()
                    break
                except LearnerLost as error:
                    lost = error
        summary.conclude(self, after, setup_s)

    def go_on(self) -> dict[str, Any]:
        """Everything from where the run is to its trained model; returns the last evaluation."""
        cfg = self.cfg
        self.refresh_if_due()
        if not self.before:
            self.before = self.evaluate(0, cfg.evaluation.samples)
            self.origin = resume.state(self)
        self.stopping.gently = True
        self.evaluate_if_due()  # a run that was stopped after its step did without
        for step in range(self.done + 1, cfg.steps + 1):
            self.step(step)
            self.done = step
            refreshed = False
            if not self.stopping.is_set():
                self.evaluate_if_due()
                refreshed = self.refresh_if_due()
            last = step == cfg.steps or self.stopping.is_set()
            if last or refreshed or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
                self.save_checkpoint()
            if self.stopping.is_set():
                raise KeyboardInterrupt
        self.stopping.gently = False
        if cfg.algorithm.data == "sft_samples" and cfg.steps:
            self.sync()  # its samples came from the model it began with; what is measured is the trained one
        after = self.evaluate(cfg.steps, cfg.evaluation.samples) if cfg.steps else self.before
        self.learner.save_model(str(self.run_dir / "model"), self.tokenizer)
        return after

    def step(self, step: int) -> None:
        """One turn of the loop."""
        begun = time.monotonic()
        self.timing, self.refused = {}, 0
        groups, scored = self.draw()
        scores = read_scores(scored)
        with self.phase("adv"):
            batch = assemble(self.cfg, [g.meta for g in groups], scores)
        with self.phase("ref"):
            references = self.refer(groups, batch)
        with self.phase("update"):
            result = self.update(step, groups, batch, references)
        with self.phase("sync"):
            synced = self.sync() if self.changed(result) else {}
            self.reset_reference(step)
        self.account(step, groups, scores, batch)
        self.rollout_log.write(step, groups, scored, batch.advantages)
        self.timing["step"] = time.monotonic() - begun
        self.record(step, groups, scores, batch, result, synced)

    # ---- its parts --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring every actor up, side by side, and prove that the generators hold the learner's weights."""
        cfg = self.cfg
        saved = self.saved
        state = json.loads((saved / checkpoint.STATE).read_text()) if saved else None
        self.tokenizer = load_tokenizer(cfg.model)
        self.model_path = str(materialise(cfg.model, self.run_dir / "initial_model", cfg.seed))
        # From here on every actor reads this one directory, whatever it was made from.
        cfg.model.path, cfg.model.init, cfg.model.gguf_file, cfg.model.tokenizer = (
            self.model_path,
            "pretrained",
            "",
            "",
        )
        self.size = model_size(cfg.model)
        self.load_data()
        self.learner = LearnerGroup(cfg)
        self.generators = GeneratorPool(
            cfg,
            self.model_path,
            stop_ids(self.tokenizer, self.model_path),
            cfg.data.max_prompt_tokens + cfg.rollout.max_tokens,
        )
        self.rewards = RewardClient(cfg, self.model_path)
        needs_reference = cfg.algorithm.beta > 0 and cfg.algorithm.kl_placement != "none"
        self.reference = ReferencePool(cfg, self.run_dir) if needs_reference else None
        self.refresher = Refresher(self) if cfg.reward_model.refresh else None
        self.rollout_log = RolloutLog(cfg, self.run_dir / "rollouts", self.model_path)
        goes_on = (
            cfg.resume == "auto" or (self.run_dir / "metrics.jsonl").exists()
        )  # else: a fork of another run
        self.log = MetricLog(
            self.run_dir,
            wandb=cfg.logging.wandb,
            wandb_project=cfg.logging.wandb_project,
            ray_metrics=cfg.logging.ray_metrics,
            run_meta={
                "experiment": cfg.experiment,
                "model": cfg.model.name,
                "seed": cfg.seed,
                "steps": cfg.steps,
            },
            settings=self.settings,
            wandb_id=state["wandb_id"] if state and goes_on else None,
            resume_step=state["done"] if state else None,
        )
        self.dispatcher = self.dispatch(self.drop)
        readmitted = resume.restore(self, state, saved) if state else []
        self.learner.start(str(saved) if saved else None)
        self.generators.start()
        self.rewards.start()
        if self.refresher:
            self.refresher.serve()
        self.rollout_log.start()
        if self.reference:
            self.reference.start()
            if saved and self.reference_reset_at:
                self.reference.restore(str(saved / resume.REFERENCE))
        if saved:
            print(f"volley: going on after step {self.done}", flush=True)
        self.origin = state or resume.state(self)
        self.take_up(readmitted)

    def take_up(self, readmitted: list[tuple[int, Prompt]]) -> None:
        """Bring the learner's weights to the generators, and give out what was admitted and not trained."""
        self.sync(probe=[self.encode(p.text) for p in self.heldout[:4]])
        for group_id, prompt in readmitted:
            self.submit(group_id, prompt)

    def fall_back(self, why: LearnerLost) -> None:
        """New learner ranks in this same run, and everything else back to the last checkpoint (or the beginning, where
        there is none): the steps since are made again, alike, since all they depend on is in there."""
        self.progress.phase("restart")
        saved, state = resume.last(self)
        self.learner.revive(why, str(saved) if saved else None)
        self.generators.abandon()
        self.rewards.forget()
        self.dispatcher, self.queue, self.given = self.dispatch(self.drop), [], {}
        readmitted = resume.restore(self, state, saved)
        self.log.rewind(self.done)
        if self.refresher:
            self.refresher.serve()
        if self.reference:
            self.reference.restore(
                str(saved / resume.REFERENCE) if saved and self.reference_reset_at else None
            )
        self.progress.note(f"going on after step {self.done}")
        self.take_up(readmitted)

    def load_data(self) -> None:
        """Prompts of both sides; and do the rewards judge what is known of them?"""
        train, self.heldout = datasets(self.cfg, self.tokenizer)
        self.sampler = Sampler(self.cfg.data, train, self.cfg.seed)
        if note := preflight.check_rewards(self.cfg, self.heldout)[1]:
            print(f"volley: note: {note}", flush=True)

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def draw(self) -> tuple[list[Group], list[Any]]:
        """The groups of a step and their SCORED batches, in order of id: prompts_per_step of them, and with
        algorithm.filter=resample as many more as it takes for so many to be alive, within options.max_draws."""
        wanted, a = self.cfg.rollout.prompts_per_step, self.cfg.algorithm
        groups: list[Group] = []
        scored: list[Any] = []
        more = wanted
        while more:
            with self.phase("gen"):
                self.admit(more, len(groups))
                new = self.collect(more, len(groups))
            with self.phase("reward"):
                scored += (
                    [self.given.pop(g.meta.group_id) for g in new]
                    if self.given
                    else self.rewards.collect(new)
                )
                check_failures(self.cfg, read_scores(scored))
            groups += new
            more = (
                0
                if a.filter != "resample"
                else regimes.groups_to_draw(
                    wanted,
                    alive(self.cfg, [g.meta for g in groups], read_scores(scored)),
                    len(groups),
                    0,
                    int(a.options.get("max_draws", 4) * wanted),
                )
            )
        return groups, scored

    def admit(self, needed: int, drawn: int = 0) -> None:
        """Start as many groups as can still be trained within max_staleness versions (actors/staleness.py), and those
        of the `needed` next ones that are not on their way. `drawn`: groups of this step that are here already."""
        r = self.cfg.rollout
        waiting = self.ledger.waiting - drawn
        room = max(
            admissible(waiting, r.prompts_per_step, r.max_staleness) if not drawn else 0,
            needed - waiting,
        )
        for prompt in self.sampler.next(room):
            group_id = self.ledger.admitted
            self.ledger.admit(group_id)
            self.submit(group_id, prompt)

    def submit(self, group_id: int, prompt: Prompt) -> None:
        """Have an admitted group's completions made; where the data holds them, they are there at once."""
        cfg, ids = self.cfg, self.encode(prompt.text)
        if cfg.algorithm.data not in COLUMNS:
            self.dispatcher.submit(
                group_id, prompt, ids, cfg.rollout.group_size, self.sampling(), self.version
            )
            return
        group, self.given[group_id] = given_group(
            group_id,
            prompt,
            ids,
            self.tokenizer,
            cfg.algorithm.data,
            cfg.seed,
            cfg.rollout.max_tokens,
        )
        self.ledger.finish(group_id)
        self.queue.append(group)

    def dispatch(self, drop: Callable[[int, str], None] | None = None) -> Dispatcher:
        return Dispatcher(self.generators, self.cfg.seed, self.cfg.rollout.timeout_s, drop)

    def drop(self, group_id: int, reason: str) -> None:
        """Leave out a group that no generator takes; another comes in its place."""
        self.ledger.finish(group_id)
        self.ledger.drop(group_id, "refused")
        self.refused += 1
        self.progress.note(f"group {group_id} is left out: {reason}")
        if self.refused > self.cfg.rollout.prompts_per_step:
            raise RunError(
                f"{self.refused} prompts of one step were refused by the generators; the last: {reason}. "
                "Mend the data."
            )

    def collect(self, n: int, drawn: int = 0) -> list[Group]:
        """The n oldest admitted groups, when all of them are done. Others that finish meanwhile wait in the queue."""
        while True:
            first = sorted(self.ledger.in_flight | {g.meta.group_id for g in self.queue})[:n]
            if not any(g in self.ledger.in_flight for g in first):
                break
            for group in self.dispatcher.finished():
                self.ledger.finish(group.meta.group_id)
                self.rewards.submit(group)
                self.queue.append(group)
            self.admit(n, drawn)  # in place of groups that were left out
        chosen = sorted(
            (g for g in self.queue if g.meta.group_id in first), key=lambda g: g.meta.group_id
        )
        self.queue = [g for g in self.queue if g.meta.group_id not in first]
        return chosen

    def update(
        self, step: int, groups: list[Group], batch: Assembled, references: list[Any] | None
    ) -> dict[str, Any] | None:
        """All optimizer steps of one batch; None when the filter left nothing to train on."""
        if batch.plan is None:
            return None
        total = self.cfg.steps * self.cfg.learner.updates_per_batch
        rates = tuple(
            learning_rate(self.cfg.optimizer, self.optimizer_steps + u, total)
            for u in range(len(batch.micro_batches))
        )
        tables = [g.table for g in groups]
        result = self.learner.update(
            UpdateJob(
                self.version,
                tables,
                references,
                batch.plan,
                batch.micro_batches,
                rates,
                self.cfg.rollout.temperature,
                step > self.cfg.algorithm.options.get("value_pretrain_steps", 0),
                diagnostics_for(self.cfg, self.reference, tables, batch.plan),
            )
        )
        self.optimizer_steps += len(rates)
        self.check_mismatch(result["stats"])
        return result

    def changed(self, result: dict[str, Any] | None) -> bool:
        """Whether generators should get new weights: the policy moved, and it is the policy that they sample."""
        moved = result is not None and any(not s["skipped"] for s in result["steps"])
        return moved and self.cfg.algorithm.data != "sft_samples"

    def sync(self, probe: list[list[int]] | None = None) -> dict[str, float]:
        """Publish the learner's weights as a new version; every generator loads and proves them."""
        if shortage := store_shortage(plan.published(self.cfg, self.size)):
            raise RunError(shortage)
        self.version += probe is None
        self.published = published = self.learner.publish(self.version, probe)
        figures = self.generators.sync(published)
        figures["bytes"] = float(sum(e.offset for b in published.buckets for e in b.entries[-1:]))
        return figures

    def refer(self, groups: list[Group], batch: Assembled) -> list[Any] | None:
        """Reference log-probs of the groups that are trained on, once they exist; None for the others."""
        if self.reference is None or batch.plan is None:
            return None
        chosen = [i for i, kept in enumerate(batch.kept) if kept]
        found = self.reference.logprobs([groups[i].table for i in chosen])
        refs: list[Any] = [None] * len(groups)
        for i, ref in zip(chosen, found, strict=True):
            refs[i] = ref
        return refs

    def reset_reference(self, step: int) -> None:
        """The policy just published becomes the reference, every algorithm.reference_reset_every steps (R1-Zero)."""
        every = self.cfg.algorithm.reference_reset_every
        if every and step % every == 0:
            self.reference.load(self.published.buckets)
            self.reference_reset_at = step
            self.progress.note(f"reference: now the policy of step {step}")

    def refresh_if_due(self) -> bool:
        """Iterative RL: the reward model learns from the policy as it is; whether it did."""
        if not (self.refresher and self.refresher.due(self.done)):
            return False
        self.refresher.refresh(self.done)
        return True

    def evaluate_if_due(self) -> None:
        """The evaluation of the step just done, before its checkpoint, which then holds what it found."""
        every = self.cfg.evaluation.every
        if every and self.evaluated < self.done < self.cfg.steps and self.done % every == 0:
            self.evaluate(self.done, self.cfg.evaluation.samples_during)

    def sample(
        self, prompts: list[Prompt], n: int, temperature: float
    ) -> tuple[list[Group], list[Any]]:
        """Groups that are not trained on, and their SCORED batches, in the order of the prompts."""
        requests = [
            Request(
                p, self.encode(p.text), n, SamplingParams(self.cfg.rollout.max_tokens, temperature)
            )
            for p in prompts
        ]
        first = EVALUATION_IDS - self.evaluations - 1
        self.evaluations += len(prompts)
        return sample(
            self.dispatch(), self.rewards, requests, first, self.version, in_flight(self.cfg)
        )

    def evaluate(self, step: int, samples: int) -> dict[str, Any]:
        """pass@k, maj@k, format and length on the held-out prompts, sampled at evaluation.temperature."""
        begun = time.monotonic()
        groups, scored = self.sample(self.heldout, samples, self.cfg.evaluation.temperature)
        found = evaluation(groups, read_scores(scored), samples, list(self.cfg.reward.models))
        self.measured |= self.log.log(
            step, {f"eval/{k}": v for k, v in found.items() if v is not None}
        )
        self.evaluated, found["seconds"] = step, time.monotonic() - begun
        self.progress.note(
            "held out: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items() if v is not None)
        )
        return found

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Commit everything the rest of the run depends on. A disk that is full costs this checkpoint, not the run."""
        begun = time.monotonic()
        try:
            if shortage := preflight.disk_shortage(
                self.store.staging, plan.checkpoint(self.cfg, self.size)
            ):
                raise OSError(shortage)
            self.rollout_log.flush()  # a resumed run does not make these steps again
            self.store.write(self.done, resume.state(self), self.save_tensors, self.cfg.checkpoint)
            shutil.rmtree(self.run_dir / checkpoint.FETCHED, ignore_errors=True)
        except OSError as error:
            cause = getattr(error, "cause", error)  # what an actor raised, without Ray's wrapping
            self.progress.note(
                f"checkpoint of step {self.done}: {cause}. Older ones are intact; is there space left?"
            )
        self.timing["save"] = time.monotonic() - begun

    def save_tensors(self, folder: Path) -> None:
        self.learner.save_state(str(folder))
        if self.reference and self.reference_reset_at:
            self.reference.save(str(folder / resume.REFERENCE))
        if self.refresher:
            self.refresher.save(folder)

    # ---- checks and books -------------------------------------------------------------------------------------

    def check_mismatch(self, stats: dict[str, Stat]) -> None:
        """Generator and learner must agree on the tokens just sampled; past the bound nothing that follows is true."""
        if "mismatch" not in stats:
            return
        mismatch = stats["mismatch"]
        self.worst_mismatch = max(self.worst_mismatch, mismatch.max)
        if not mismatch.mean <= self.cfg.generator.mismatch_bound:
            raise RunError(
                f"learner and generators disagree by {mismatch.mean:.3g} per token on average (at most "
                f"{mismatch.max:.3g}), more than generator.mismatch_bound={self.cfg.generator.mismatch_bound:g}. "
                "Check that both run the same dtype and that rollout.temperature applies to both."
            )

    def account(self, step: int, groups: list[Group], scores: Scores, batch: Assembled) -> None:
        """Close the books of a step, and remember what its prompts did."""
        trained = []
        for group, kept, reason in zip(groups, batch.kept, batch.reasons, strict=True):
            if kept:
                trained.append(group.meta.group_id)
            else:
                self.ledger.drop(group.meta.group_id, reason)
        self.ledger.train(trained)
        self.ledger.check()
        sizes = [len(g.meta.lengths) for g in groups]
        graded = np.split(scores.accuracy[:], np.cumsum(sizes)[:-1])
        known = [g[~np.isnan(g)] for g in graded]
        moved = self.sampler.update(
            step,
            [g.prompt for g in groups],
            [int((g >= 1).sum()) for g in known],
            [len(g) for g in known],
            [batch.regimes[g.meta.group_id] for g in groups],
        )
        if moved:
            curriculum = self.sampler.curriculum
            self.progress.note(
                f"curriculum: level {curriculum.levels[curriculum.position]} from step {step + 1} on"
            )

    def record(
        self,
        step: int,
        groups: list[Group],
        scores: Scores,
        batch: Assembled,
        result: dict[str, Any] | None,
        synced: dict[str, float],
    ) -> None:
        tokens = int(sum(g.meta.lengths.sum() for g in groups))
        self.tokens += tokens
        self.generating_s += self.timing["gen"]
        values = step_metrics(
            groups,
            scores,
            batch,
            result,
            synced,
            self.timing,
            self.version,
            self.ledger.counts(),
            self.restarts(),
            list(self.cfg.reward.models),
        )
        if curriculum := self.sampler.curriculum:
            values["data/curriculum_level"] = float(curriculum.levels[curriculum.position])
        values["generator/serving"] = float(len(self.generators.serving))
        values["perf/tokens_per_s"] = tokens / self.timing["step"]
        values["perf/gen_tokens_per_s"] = tokens / max(self.timing["gen"], 1e-9)
        self.warned, begun = guards.check(self.cfg.guards, self.warned, flatten(values))
        values |= {f"guard/{name}": float(name in self.warned["active"]) for name in guards.NAMES}
        self.measured = self.log.log(step, values)
        self.progress.update(step, self.measured)
        for warning in begun:
            self.progress.note(f"warning: {warning}")

    def restarts(self) -> dict[str, int]:
        """Actors started again since the program began, by role."""
        roles = {
            "generator": self.generators,
            "learner": self.learner,
            "reference": self.reference,
            "rewards": self.rewards,
            "rollout_writer": self.rollout_log,
            "reward_model": self.rewards.models,
        }
        return {role: pool.restarts for role, pool in roles.items() if pool}

    def sampling(self) -> SamplingParams:
        r = self.cfg.rollout
        return SamplingParams(r.max_tokens, r.temperature, r.top_p, r.top_k)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        self.progress.phase(name)
        yield
        self.timing[name] = self.timing.get(name, 0.0) + time.monotonic() - begun
