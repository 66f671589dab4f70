"""Iterative RL: the reward model goes on learning from the policy it judges (DeepSeekMath, 2402.03300, algorithm 1).

Every reward_model.every steps fresh samples of the policy are graded by rule, one of reward.models is trained on them
and on a share of those of earlier iterations, and serves from then on. (The reference is set to the policy by
algorithm.reference_reset_every.) What an iteration leaves is in RUN_DIR/reward_model: NNN/, the model, and
answers_NNN.parquet; a checkpoint holds a copy of both, so a run may go on elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.data.prompt import Prompt
from actors.data.stream import PromptStream
from cluster.supervision.failures import LearnerLost
from learner.algorithms.assemble import read_scores
from learner.stages.reward_model import RewardLearner, load_answers, save_answers, shown
from reward_service.models.labelled import Answers, of_samples
from reward_service.models.meaning import NEW

if TYPE_CHECKING:
    from learner.stages.rl import Trainer

FOLDER = "reward_model"
STRIDE = 7919  # seeds of the iterations' prompts lie so far apart


class Refresher:
    """The refreshes of one run. `iteration`: how many there were; `at`: the step after which the last one was."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.cfg = trainer, trainer.cfg
        self.name, self.folder = self.cfg.reward_model.refresh, trainer.run_dir / FOLDER
        self.iteration, self.at = 0, -1

    def due(self, step: int) -> bool:
        """Whether there is to be a refresh after `step` (0: before the first) that has not been."""
        rm = self.cfg.reward_model
        wanted = (
            rm.initial
            if step == 0
            else bool(rm.every) and step % rm.every == 0 and step < self.cfg.steps
        )
        return wanted and self.at < step

    @property
    def model(self) -> str:
        """The folder of the reward model as it is; what it begins with before the first refresh."""
        if self.iteration:
            return str(self.folder / f"{self.iteration:03d}")
        path = self.cfg.reward.models[self.name]["path"]
        return self.cfg.reward_model.init or self.trainer.model_path if path == NEW else path

    def refresh(self, step: int) -> None:
        """One iteration: sample, label, train, serve. Its files are whole before the run depends on them."""
        t, number = self.trainer, self.iteration + 1
        t.progress.phase("reward model")
        fresh = self.sample(
            PromptStream(t.sampler.stream.dataset, self.cfg.seed + STRIDE * number).next(
                self.cfg.reward_model.prompts
            )
        )
        heldout = self.sample(t.heldout)
        save_answers(self.file(number), fresh, number)
        older = [load_answers(str(self.file(i)), t.tokenizer, self.cfg) for i in range(1, number)]
        old = sum(older[1:], older[0]) if older else None
        there = self.folder / f"{number:03d}"
        before, after = self.train(fresh, old, heldout, number, there)
        t.rewards.models.load(self.name, str(there))
        self.iteration, self.at = number, step
        t.measured |= t.log.log(
            step,
            {
                "reward_model/iteration": float(number),
                "reward_model/older_answers": float(len(old) if old else 0),
                **{f"reward_model/heldout/{k}": v for k, v in after.items() if v is not None},
            },
        )
        t.progress.note(
            f"reward model {self.name}, iteration {number}: held out {shown(before)} -> {shown(after)}"
        )

    def sample(self, prompts: list[Prompt]) -> Answers:
        """Answers of the policy as it is, with an outcome label each."""
        r = self.cfg.rollout
        groups, scored = self.trainer.sample(prompts, r.group_size, r.temperature)
        return of_samples(
            [g.meta for g in groups],
            [g.table for g in groups],
            read_scores(scored).accuracy,
            self.cfg.reward_model.loss == "pairwise",
        )

    def train(
        self, fresh: Answers, old: Answers | None, heldout: Answers, number: int, there: Path
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(measures before, after) of the model that is written to `there`. Ranks that are lost begin again."""
        learner = RewardLearner(self.cfg, self.model)
        learner.group.start()
        while True:
            try:
                before = learner.measure(heldout)
                learner.fit(fresh, old, self.cfg.seed + STRIDE * number)
                after = learner.measure(heldout)
                there.parent.mkdir(parents=True, exist_ok=True)
                learner.group.save_model(str(there), self.trainer.tokenizer)
                break
            except LearnerLost as error:
                learner.group.revive(error, None)
        learner.group.stop()
        return before, after

    def file(self, number: int) -> Path:
        return self.folder / f"answers_{number:03d}.parquet"

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        return {"iteration": self.iteration, "at": self.at}

    def save(self, folder: Path) -> None:
        """Copies of what `restore` needs, into a checkpoint's folder (which is flat)."""
        for file in Path(self.model).iterdir() if self.iteration else ():
            shutil.copyfile(file, folder / f"{FOLDER}.{file.name}")
        for number in range(1, self.iteration + 1):
            shutil.copyfile(self.file(number), folder / self.file(number).name)

    def restore(self, state: dict[str, int], saved: Path | None) -> None:
        """Go back to `state`, whose files are in `saved` (None: nothing was refreshed by then, or the run's own are
        meant). The pool is told by `serve`, once it runs."""
        self.iteration, self.at = state["iteration"], state["at"]
        if not self.iteration or saved is None:
            return
        model = Path(self.model)
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir(parents=True)
        for file in saved.glob(f"{FOLDER}.*"):
            shutil.copyfile(file, model / file.name.removeprefix(f"{FOLDER}."))
        for number in range(1, self.iteration + 1):
            shutil.copyfile(saved / self.file(number).name, self.file(number))

    def serve(self) -> None:
        """The pool's actors take the model as it is."""
        if self.iteration:
            self.trainer.rewards.models.load(self.name, self.model)
