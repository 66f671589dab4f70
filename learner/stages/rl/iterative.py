"""Iterative RL: the reward model goes on learning from the policy that it judges.

DeepSeekMath (2402.03300), algorithm 1. Every reward_model.every steps fresh samples of the policy
are graded by rule, one of reward.models is trained on them and on a share of those of earlier
iterations, and serves from then on. (algorithm.reference_reset_every sets the reference to the
policy.) An iteration leaves two things in RUN_DIR/reward_model: the model in NNN/, and
answers_NNN.parquet. A checkpoint holds a copy of both, so that a run may go on elsewhere.

The functions do nothing in a run that trains no reward model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from actors.data.prompt import Prompt
from actors.data.stream import PromptStream
from cluster.supervision.failures import LearnerLost
from learner.stages.reward_answers import load_answers, save_answers
from learner.stages.reward_learner import RewardLearner, summary_line
from learner.stages.rl.evaluate import sample_policy
from learner.stages.rl.run import RLRun
from learner.state import State
from reward_service.models.labelled import Answers, of_samples
from reward_service.models.meaning import NEW

FOLDER = "reward_model"
STRIDE = 7919  # distance between the seeds of two iterations' prompts


def refresh_if_due(run: RLRun, state: State) -> bool:
    """Train the reward model on the policy as it is, where that is due. Returns whether it was."""
    if not is_due(run, state):
        return False
    refresh(run, state)
    return True


def is_due(run: RLRun, state: State) -> bool:
    """Whether the step just done (0: the start) is followed by a refresh that has not been."""
    rm, step = run.cfg.reward_model, state.done
    if not rm.refresh or state.refreshed_at >= step:
        return False
    if step == 0:
        return rm.initial
    return bool(rm.every) and step % rm.every == 0 and step < run.cfg.steps


def current_model(run: RLRun, state: State) -> str:
    """The folder of the reward model as it is; before the first refresh, what it begins with."""
    if state.refreshes:
        return str(model_folder(run, state.refreshes))
    rm = run.cfg.reward_model
    path = run.cfg.reward.models[rm.refresh]["path"]
    return rm.init or run.policy.path if path == NEW else path


def model_folder(run: RLRun, number: int) -> Path:
    """Where iteration `number`, counted from 1, leaves its model."""
    return run.launch.run_dir / FOLDER / f"{number:03d}"


def answers_file(run: RLRun, number: int) -> Path:
    """Where iteration `number`, counted from 1, leaves its labelled answers."""
    return run.launch.run_dir / FOLDER / f"answers_{number:03d}.parquet"


def refresh(run: RLRun, state: State) -> None:
    """One iteration: sample, label, train, serve. Its files are whole before the run needs them."""
    rm, number = run.cfg.reward_model, state.refreshes + 1
    run.progress.phase("reward model")
    stream = PromptStream(run.data.sampler.stream.dataset, run.cfg.seed + STRIDE * number)
    fresh = labelled_samples(run, state, stream.next(rm.prompts))
    heldout = labelled_samples(run, state, run.data.heldout)
    save_answers(answers_file(run, number), fresh, number)
    earlier = [
        load_answers(str(answers_file(run, i)), run.policy.tokenizer, run.cfg)
        for i in range(1, number)
    ]
    old = sum(earlier[1:], earlier[0]) if earlier else None
    folder = model_folder(run, number)
    before, after = train(run, current_model(run, state), fresh, old, heldout, number, folder)
    run.rewards.models.load(rm.refresh, str(folder))
    state.refreshes, state.refreshed_at = number, state.done
    measures = {f"reward_model/heldout/{k}": v for k, v in after.items() if v is not None}
    counts = {
        "reward_model/iteration": float(number),
        "reward_model/older_answers": float(len(old) if old else 0),
    }
    state.metrics |= run.log.log(state.done, counts | measures)
    run.progress.note(
        f"reward model {rm.refresh}, iteration {number}: "
        f"held out {summary_line(before)} -> {summary_line(after)}"
    )


def labelled_samples(run: RLRun, state: State, prompts: list[Prompt]) -> Answers:
    """Answers of the policy as it is, with an outcome label each."""
    r = run.cfg.rollout
    batch = sample_policy(run, state, prompts, r.group_size, r.temperature)
    pairwise = run.cfg.reward_model.loss == "pairwise"
    return of_samples(batch.metas, batch.tables, batch.scores.accuracy, pairwise)


def train(
    run: RLRun,
    begins_as: str,
    fresh: Answers,
    old: Answers | None,
    heldout: Answers,
    number: int,
    folder: Path,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train the model that begins as the folder `begins_as`, and write it to `folder`.

    Returns its measures on `heldout` before and after. Ranks that are lost start over.
    """
    learner = RewardLearner(run.cfg, begins_as)
    learner.group.start()
    while True:
        try:
            before = learner.measure(heldout)
            learner.fit(fresh, old, run.cfg.seed + STRIDE * number)
            after = learner.measure(heldout)
            folder.parent.mkdir(parents=True, exist_ok=True)
            learner.group.save_model(str(folder), run.policy.tokenizer)
            break
        except LearnerLost as error:
            learner.group.revive(error, None)
    learner.group.stop()
    return before, after


# ---- checkpoints ---------------------------------------------------------------------------------


def save(run: RLRun, state: State, folder: Path) -> None:
    """Copy what `restore` needs into a checkpoint's folder, which is flat."""
    if not state.refreshes:
        return
    for file in Path(current_model(run, state)).iterdir():
        shutil.copyfile(file, folder / f"{FOLDER}.{file.name}")
    for number in range(1, state.refreshes + 1):
        file = answers_file(run, number)
        shutil.copyfile(file, folder / file.name)


def restore(run: RLRun, state: State, saved: Path | None) -> None:
    """Bring the files of the state's iterations back from the checkpoint in `saved`.

    None: the run goes back to its own start, and its own files are the right ones.
    """
    if not state.refreshes or saved is None:
        return
    model = Path(current_model(run, state))
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    for file in saved.glob(f"{FOLDER}.*"):
        shutil.copyfile(file, model / file.name.removeprefix(f"{FOLDER}."))
    for number in range(1, state.refreshes + 1):
        file = answers_file(run, number)
        shutil.copyfile(saved / file.name, file)


def serve(run: RLRun, state: State) -> None:
    """Have the actors of the reward-model pool load the model as it is."""
    if state.refreshes:
        run.rewards.models.load(run.cfg.reward_model.refresh, current_model(run, state))
