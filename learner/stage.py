"""A stage of a run as a value, and the one loop that runs every stage.

A run is a list of stages. A `Stage` names what goes in and what comes out, and gives the loop a few
functions; `State` is what a checkpoint keeps of the driver; `Run` holds the handles of a stage
(settings, log, actors) and never changes once it is built. Stopping (SIGTERM), lost learners,
checkpoints and resuming are handled here, once for all stages.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.monitoring.progress import Progress
from cluster.monitoring.sinks import MetricLog
from cluster.stopping import RunError
from cluster.supervision.failures import LearnerLost
from conf.schema import Config
from learner.checkpoints import checkpoint, resume
from learner.engine.group import LearnerGroup
from learner.launch import Launch
from learner.state import State


@dataclass(frozen=True)
class Run:
    """The handles that every stage has. Stages add their own in a subclass.

    `cfg` may differ from `launch.cfg` in the model alone, which is by then a local folder.
    `learner` is None where a stage trains nothing and has nothing to sample.
    """

    launch: Launch
    cfg: Config
    log: MetricLog
    progress: Progress
    learner: LearnerGroup | None


def nothing_due(run: Any, state: State) -> bool:
    """`Stage.between` of a stage that does nothing between two steps."""
    return False


@dataclass(frozen=True)
class Stage:
    """What the loop has to know of one kind of stage. Its functions get the stage's own Run.

    The settings group of the same name (conf/stage/NAME.yaml) says where answers come from and what
    is trained; the roster of actors follows from that (cluster/roster.py).
    """

    name: str
    inputs: Mapping[str, str]  # what the stage reads -> the setting that names it
    outputs: Mapping[str, str]  # what it leaves -> the path below the run's folder
    build: Callable[[Launch, State, ExitStack], Any]  # create the actors; do not wait for them
    ready: Callable[[Any, State, Path | None], None]  # wait for them, and bring them to the state
    rewind: Callable[[Any, State, Path | None], None]  # bring running actors back to the state
    steps: Callable[[Any], int]
    step: Callable[[Any, State, int], None]  # do step number 1, 2, ...
    finish: Callable[
        [Any, State], dict[str, Any]
    ]  # after the last step: measure, write the outputs
    conclude: Callable[[Any, State, dict[str, Any], float], None]  # the summary of a finished stage
    begin: Callable[[Any, State], None] = lambda run, state: None  # before the first step
    between: Callable[[Any, State], bool] = nothing_due  # after a step; True asks for a checkpoint
    save: Callable[[Any, State, Path], None] | None = None  # tensors of a checkpoint; None: none


@dataclass
class Origin:
    """Where a stage goes back to while it has written no checkpoint of its own."""

    saved: Path | None
    state: dict[str, Any] = field(default_factory=dict)


def run_stage(stage: Stage, launch: Launch) -> None:
    """Run one stage from its start, or from the checkpoint `launch.saved`, to its outputs."""
    state = State.read(launch.saved) if launch.saved else State()
    with ExitStack() as stack:
        run = stage.build(launch, state, stack)
        stage.ready(run, state, launch.saved)
        setup_s = time.monotonic() - launch.started
        origin = Origin(launch.saved, state.snapshot())
        with run.progress:
            run.progress.note(f"engines ready after {setup_s:.0f} s")
            state, result = run_steps(stage, run, state, origin)
        check_outputs(stage, launch.run_dir)
        stage.conclude(run, state, result, setup_s)


def run_steps(stage: Stage, run: Run, state: State, origin: Origin) -> tuple[State, dict[str, Any]]:
    """All steps that are left, and `finish`, whose result is returned with the last State.

    Where the learner is lost the stage goes back to its last checkpoint and tries again, until the
    learner's budget of restarts is used up (RestartsExhausted).
    """
    lost: LearnerLost | None = None
    while True:
        try:
            if lost:
                state = fall_back(stage, run, origin, lost)
            return state, advance(stage, run, state, origin)
        except LearnerLost as error:
            lost = error


def advance(stage: Stage, run: Run, state: State, origin: Origin) -> dict[str, Any]:
    """From `state.done` to the end.

    Raises KeyboardInterrupt after a step during which SIGTERM came.
    """
    stopping, every, total = run.launch.stopping, run.cfg.checkpoint.every, stage.steps(run)
    stage.begin(run, state)
    if state.done == 0:
        origin.state = state.snapshot()  # what was measured before the first step stays
    stopping.gently = True
    stage.between(run, state)  # a run that was stopped after its step did without
    for number in range(state.done + 1, total + 1):
        stage.step(run, state, number)
        state.done = number
        stop = stopping.is_set()
        asked = False if stop else stage.between(run, state)
        if number == total or stop or asked or (every and number % every == 0):
            save_checkpoint(stage, run, state)
        if stop:
            raise KeyboardInterrupt
    stopping.gently = False
    return stage.finish(run, state)


def fall_back(stage: Stage, run: Run, origin: Origin, why: LearnerLost) -> State:
    """Replace the lost learner ranks without ending the run, and return the State to go on from.

    Everything else goes back to the last checkpoint, or to the start if there is none. The steps
    after it are repeated and give the same result, because the checkpoint holds all of their
    inputs.
    """
    run.progress.phase("restart")
    saved = run.launch.store.newest(resume.tell_refusal)
    state = State.read(saved) if saved else State.from_json(origin.state)
    saved = saved or origin.saved
    run.learner.revive(why, str(saved) if saved else None)
    run.log.rewind(state.done)
    run.progress.note(f"going on after step {state.done}")
    stage.rewind(run, state, saved)
    return state


def save_checkpoint(stage: Stage, run: Run, state: State) -> None:
    """Commit everything the rest of the stage depends on.

    A full disk costs this checkpoint, not the run: older checkpoints stay, and the user is told.
    """
    if stage.save is None:
        return
    launch = run.launch
    content = state.to_json() | {"config": launch.settings}
    try:
        launch.store.write(
            state.done, content, lambda folder: stage.save(run, state, folder), run.cfg.checkpoint
        )
        shutil.rmtree(launch.run_dir / checkpoint.FETCHED, ignore_errors=True)
    except OSError as error:
        cause = getattr(error, "cause", error)  # what an actor raised, without Ray's wrapping
        run.progress.note(
            f"checkpoint of step {state.done}: {cause}. Older ones are intact; is there space left?"
        )


def check_outputs(stage: Stage, run_dir: Path) -> None:
    """Raise RunError where a finished stage did not leave what it is to leave."""
    for name, path in stage.outputs.items():
        if not (run_dir / path).exists():
            raise RunError(f"stage {stage.name} ended without its output {name}: {run_dir / path}")


def open_log(launch: Launch, state: State, steps: int, stack: ExitStack) -> MetricLog:
    """The stage's metrics log; it goes on in the same wandb run where the run itself goes on."""
    cfg, saved = launch.cfg, launch.saved
    goes_on = cfg.resume == "auto" or (launch.run_dir / "metrics.jsonl").exists()  # else a fork
    log = MetricLog(
        launch.run_dir,
        wandb=cfg.logging.wandb,
        wandb_project=cfg.logging.wandb_project,
        ray_metrics=cfg.logging.ray_metrics,
        run_meta={
            "experiment": cfg.experiment,
            "model": cfg.model.name,
            "seed": cfg.seed,
            "steps": steps,
        },
        settings=launch.settings,
        wandb_id=state.wandb_id if saved and goes_on else None,
        resume_step=state.done if saved else None,
    )
    stack.callback(log.close)
    state.wandb_id = log.wandb_id
    return log


def plain_progress(cfg: Config, steps: int) -> Progress:
    """The progress of a stage that prints lines of its own and has no live view."""
    return Progress(steps, "off" if cfg.logging.progress == "off" else "plain", cfg.experiment)
