"""Reinforcement learning, SFT and DPO: the stage that trains the policy. `step` is one turn of the
loop.

prompts -> rollouts -> rewards -> advantages -> loss -> weights -> (back to rollouts)
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from actors.data.sampler import Sampler
from actors.reference import ReferencePool
from actors.rollout_log import RolloutLog
from cluster import plan as needs
from cluster.connect import store_shortage
from cluster.monitoring.metrics import flatten
from cluster.monitoring.progress import Progress
from cluster.monitoring.stat import Stat
from cluster.roster import has_reference
from cluster.stopping import RunError
from learner.algorithms.assemble import Assembled, assemble
from learner.algorithms.schedule import learning_rate
from learner.engine.diagnostics import diagnostics_for
from learner.engine.job import UpdateJob
from learner.evaluation import guards
from learner.evaluation.step_metrics import step_metrics
from learner.launch import Launch
from learner.preflight.machine import disk_shortage
from learner.stage import Stage, open_log
from learner.stages import engines
from learner.stages.rl import iterative, summary
from learner.stages.rl.batch import Batch
from learner.stages.rl.clock import Clock
from learner.stages.rl.evaluate import evaluate, evaluate_if_due
from learner.stages.rl.group_queue import GroupQueue
from learner.stages.rl.groups import draw, submit
from learner.stages.rl.run import RLRun, TrainingData
from learner.state import State
from reward_service.client import RewardClient

REFERENCE = "reference.safetensors"  # in a checkpoint only after the reference was reset


# ---- the loop ------------------------------------------------------------------------------------


def step(run: RLRun, state: State, number: int) -> None:
    """One turn of the loop."""
    clock = Clock(run.progress)
    batch = draw(run, state, clock)
    with clock.phase("adv"):
        plan = assemble(run.cfg, batch.metas, batch.scores)
    with clock.phase("ref"):
        batch = refer(run, batch, plan)
    with clock.phase("update"):
        result = update(run, state, number, batch, plan)
    with clock.phase("sync"):
        synced = sync(run, state) if changed(run, result) else {}
        reset_reference(run, state, number)
    account(run, state, number, batch, plan)
    run.rollout_log.write(number, batch.groups, [m.scores for m in batch.members], plan.advantages)
    clock.stop()
    record(run, state, number, batch, plan, result, synced, clock)


def refer(run: RLRun, batch: Batch, plan: Assembled) -> Batch:
    """The batch with reference log-probs of the groups that are trained on, once they exist."""
    if run.reference is None or plan.plan is None:
        return batch
    trained = [i for i, kept in enumerate(plan.kept) if kept]
    return batch.with_references(
        trained, run.reference.logprobs([batch.tables[i] for i in trained])
    )


def update(
    run: RLRun, state: State, number: int, batch: Batch, plan: Assembled
) -> dict[str, Any] | None:
    """All optimizer steps of one batch; None where the filter left nothing to train on."""
    if plan.plan is None:
        return None
    cfg, a = run.cfg, run.cfg.algorithm
    total = cfg.steps * cfg.learner.updates_per_batch
    rates = tuple(
        learning_rate(cfg.optimizer, state.optimizer_steps + u, total)
        for u in range(len(plan.micro_batches))
    )
    job = UpdateJob(
        state.version,
        batch.tables,
        batch.references,
        plan.plan,
        plan.micro_batches,
        rates,
        cfg.rollout.temperature,
        number > a.options.get("value_pretrain_steps", 0),
        diagnostics_for(cfg, run.reference, batch.tables, plan.plan),
    )
    result = run.learner.update(job)
    state.optimizer_steps += len(rates)
    check_mismatch(run, state, result["stats"])
    return result


def check_mismatch(run: RLRun, state: State, stats: dict[str, Any]) -> None:
    """Compare learner and generator on the tokens just sampled.

    Raises RunError where they disagree by more than generator.mismatch_bound, because nothing that
    is computed from such samples is true.
    """
    if "mismatch" not in stats:
        return
    mismatch: Stat = stats["mismatch"]
    state.worst_mismatch = max(state.worst_mismatch, mismatch.max)
    bound = run.cfg.generator.mismatch_bound
    if not mismatch.mean <= bound:
        raise RunError(
            f"learner and generators disagree by {mismatch.mean:.3g} per token on average (at most "
            f"{mismatch.max:.3g}), more than generator.mismatch_bound={bound:g}. "
            "Check that both run the same dtype and that rollout.temperature applies to both."
        )


def changed(run: RLRun, result: dict[str, Any] | None) -> bool:
    """Whether generators should get new weights: the policy moved, and it is what they sample."""
    moved = result is not None and any(not s["skipped"] for s in result["steps"])
    return moved and run.cfg.algorithm.data != "sft_samples"


def sync(run: RLRun, state: State, probe: list[list[int]] | None = None) -> dict[str, float]:
    """Publish the learner's weights as a new version; every generator loads and proves them.

    With `probe` (token ids) the version stays what it is: actors that have just started get it.
    """
    if shortage := store_shortage(needs.published(run.cfg, run.policy.size)):
        raise RunError(shortage)
    if probe is None:
        state.version += 1
    published = run.learner.publish(state.version, probe)
    figures = run.generators.sync(published)
    figures["bytes"] = float(published.nbytes)
    return figures


def reset_reference(run: RLRun, state: State, number: int) -> None:
    """Make the policy just published the reference, every algorithm.reference_reset_every steps."""
    every = run.cfg.algorithm.reference_reset_every
    if every and number % every == 0:
        run.reference.load(run.generators.published.buckets)
        state.reference_reset_at = number
        run.progress.note(f"reference: now the policy of step {number}")


def account(run: RLRun, state: State, number: int, batch: Batch, plan: Assembled) -> None:
    """Close the ledger of a step, and tell the sampler how its prompts went."""
    trained = []
    for meta, kept, reason in zip(batch.metas, plan.kept, plan.reasons, strict=True):
        if kept:
            trained.append(meta.group_id)
        else:
            state.ledger.drop(meta.group_id, reason)
        del state.waiting[meta.group_id]
    state.ledger.train(trained)
    state.ledger.check()
    sizes = [len(m.lengths) for m in batch.metas]
    by_group = np.split(batch.scores.accuracy, np.cumsum(sizes)[:-1])
    graded = [accuracy[~np.isnan(accuracy)] for accuracy in by_group]
    sampler = run.data.sampler
    level_raised = sampler.update(
        number,
        [g.prompt for g in batch.groups],
        [int((accuracy >= 1).sum()) for accuracy in graded],
        [len(accuracy) for accuracy in graded],
        [plan.regimes[m.group_id] for m in batch.metas],
    )
    state.sampler = sampler.state()
    if level_raised:
        level = sampler.curriculum.levels[sampler.curriculum.position]
        run.progress.note(f"curriculum: level {level} from step {number + 1} on")


def record(
    run: RLRun,
    state: State,
    number: int,
    batch: Batch,
    plan: Assembled,
    result: dict[str, Any] | None,
    synced: dict[str, float],
    clock: Clock,
) -> None:
    """Write the metrics of a step, and warn where a guard says so."""
    tokens = int(sum(m.lengths.sum() for m in batch.metas))
    state.tokens += tokens
    state.generating_s += clock.seconds["gen"]
    values = step_metrics(
        batch.groups,
        batch.scores,
        plan,
        result,
        synced,
        clock.seconds,
        state.version,
        state.ledger.counts(),
        restarts(run),
        list(run.cfg.reward.models),
    )
    if curriculum := run.data.sampler.curriculum:
        values["data/curriculum_level"] = float(curriculum.levels[curriculum.position])
    values["generator/serving"] = float(len(run.generators.serving))
    values["perf/tokens_per_s"] = tokens / clock.seconds["step"]
    values["perf/gen_tokens_per_s"] = tokens / max(clock.seconds["gen"], 1e-9)
    state.warned, begun = guards.check(run.cfg.guards, state.warned, flatten(values))
    values |= {f"guard/{name}": float(name in state.warned["active"]) for name in guards.NAMES}
    state.metrics = run.log.log(number, values)
    run.progress.update(number, state.metrics)
    for warning in begun:
        run.progress.note(f"warning: {warning}")


def restarts(run: RLRun) -> dict[str, int]:
    """How often actors were started again since the program began, by role."""
    by_role = {
        "generator": run.generators,
        "learner": run.learner,
        "reference": run.reference,
        "rewards": run.rewards,
        "rollout_writer": run.rollout_log,
        "reward_model": run.rewards.models,
    }
    return {role: actors.restarts for role, actors in by_role.items() if actors}


# ---- around the loop -----------------------------------------------------------------------------


def build(launch: Launch, state: State, stack: ExitStack) -> RLRun:
    """Create every actor, side by side."""
    cfg, policy = engines.open_policy(launch.cfg, launch.run_dir)
    train, heldout = engines.load_prompts(cfg, policy)
    engines.check_rewards(cfg, heldout)
    learner = engines.create_learner(cfg)
    generators = engines.create_generators(cfg, policy)
    rewards = RewardClient(cfg, policy.path)
    return RLRun(
        launch=launch,
        cfg=cfg,
        log=open_log(launch, state, cfg.steps, stack),
        progress=Progress(cfg.steps, cfg.logging.progress, cfg.experiment, done=state.done),
        learner=learner,
        policy=policy,
        data=TrainingData(Sampler(cfg.data, train, cfg.seed), heldout),
        generators=generators,
        rewards=rewards,
        reference=ReferencePool(cfg, launch.run_dir) if has_reference(cfg) else None,
        rollout_log=RolloutLog(cfg, launch.run_dir / "rollouts", policy.path),
        groups=GroupQueue(cfg, policy, generators, rewards),
    )


def ready(run: RLRun, state: State, saved: Path | None) -> None:
    """Wait for the actors; the generators prove that they hold the learner's weights."""
    if saved:
        run.data.sampler.restore(state.sampler)
        iterative.restore(run, state, saved)
    state.sampler = run.data.sampler.state()
    run.learner.start(str(saved) if saved else None)
    run.generators.start()
    run.rewards.start()
    iterative.serve(run, state)
    run.rollout_log.start()
    if run.reference:
        run.reference.start()
        if saved and state.reference_reset_at:
            run.reference.restore(str(saved / REFERENCE))
    if saved:
        print(f"volley: going on after step {state.done}", flush=True)
    take_up(run, state)


def rewind(run: RLRun, state: State, saved: Path | None) -> None:
    """Bring every actor but the learner, which has just been replaced, back to the state."""
    run.generators.abandon()
    run.rewards.forget()
    run.groups.clear()
    run.data.sampler.restore(state.sampler)
    iterative.restore(run, state, saved)
    iterative.serve(run, state)
    if run.reference:
        reset = saved and state.reference_reset_at
        run.reference.restore(str(saved / REFERENCE) if reset else None)
    take_up(run, state)


def take_up(run: RLRun, state: State) -> None:
    """Bring the learner's weights to the generators, and start the groups that were waiting."""
    sync(run, state, probe=engines.probe_of(run.policy, run.data.heldout))
    submit(run, state, sorted(state.waiting.items(), key=lambda item: item[0]))


def begin(run: RLRun, state: State) -> None:
    """Before the first step: train the reward model where that is asked for, and evaluate."""
    if state.done == 0:
        iterative.refresh_if_due(run, state)
    if not state.before:
        state.before = evaluate(run, state, 0, run.cfg.evaluation.samples)


def between(run: RLRun, state: State) -> bool:
    """After a step: evaluate, and train the reward model, where due. True after the latter."""
    evaluate_if_due(run, state)
    return iterative.refresh_if_due(run, state)


def save(run: RLRun, state: State, folder: Path) -> None:
    """Write the tensors of a checkpoint. Raises OSError where the disk has too little room."""
    size = needs.checkpoint(run.cfg, run.policy.size)
    if shortage := disk_shortage(run.launch.store.staging, size):
        raise OSError(shortage)
    run.rollout_log.flush()  # a resumed run does not make these steps again
    run.learner.save_state(str(folder))
    if run.reference and state.reference_reset_at:
        run.reference.save(str(folder / REFERENCE))
    iterative.save(run, state, folder)


def finish(run: RLRun, state: State) -> dict[str, Any]:
    """The last evaluation, and the trained model in RUN_DIR/model."""
    cfg = run.cfg
    if cfg.algorithm.data == "sft_samples" and cfg.steps:
        sync(run, state)  # the samples came from the first policy; the trained one is measured
    after = evaluate(run, state, cfg.steps, cfg.evaluation.samples) if cfg.steps else state.before
    run.learner.save_model(str(run.launch.run_dir / "model"), run.policy.tokenizer)
    return after


STAGE = Stage(
    name="rl",
    inputs={"model": "model.path", "data": "data.kind"},
    outputs={"model": "model"},
    build=build,
    ready=ready,
    rewind=rewind,
    steps=lambda run: run.cfg.steps,
    begin=begin,
    step=step,
    between=between,
    save=save,
    finish=finish,
    conclude=summary.conclude,
)
