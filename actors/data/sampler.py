"""Which prompts are trained on next: the stream of the data set, with some prompts rejected. Pure.

With data.sampler=balanced a prompt is accepted with probability `PromptHistory.acceptance`: 1 at a
pass rate of 0.5, and less on either side. With data.curriculum its level decides as well. Whether a
prompt is accepted depends on the seed, the cursor and the results so far. A checkpoint holds all of
them, so a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.data.history import Curriculum, PromptHistory
from actors.data.prompt import Prompt, stable_rng
from actors.data.stream import Dataset, PromptStream

TRIES = 2000  # the most prompts that are drawn for each one accepted


class Sampler:
    """Draws from `dataset` by the settings `data` (sampler, sampler_floor, curriculum_*)."""

    def __init__(self, data: Any, dataset: Dataset, seed: int) -> None:
        self.data, self.seed = data, seed
        self.stream = PromptStream(dataset, seed)
        self.history = PromptHistory()
        self.curriculum = (
            Curriculum(
                sorted(data.curriculum),
                data.curriculum_up,
                data.curriculum_window,
                data.curriculum_replay,
            )
            if data.curriculum
            else None
        )

    def next(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts. ValueError where the data set has too few of the level."""
        if self.data.sampler == "uniform" and self.curriculum is None:
            return self.stream.next(n)
        accepted: list[Prompt] = []
        for _ in range(TRIES * n):
            if len(accepted) == n:
                break
            draw = stable_rng("sampler", self.seed, self.stream.cursor).random()
            prompt = self.stream.next(1)[0]
            if draw < self.acceptance(prompt):
                accepted.append(prompt)
        if len(accepted) < n:
            level = self.curriculum.levels[self.curriculum.position] if self.curriculum else None
            raise ValueError(
                f"data.curriculum={list(self.data.curriculum)}: {TRIES * n} prompts of "
                f"{self.stream.dataset.name} held only {len(accepted)} of level {level} or below; "
                "name levels that the data set has"
            )
        return accepted

    def acceptance(self, prompt: Prompt) -> float:
        """Probability that a drawn prompt is accepted, by its history and its level."""
        probability = 1.0
        if self.data.sampler == "balanced":
            probability = self.history.acceptance(prompt.prompt_id, self.data.sampler_floor)
        if self.curriculum:
            probability *= self.curriculum.acceptance(prompt.level)
        return probability

    def update(
        self,
        step: int,
        prompts: Sequence[Prompt],
        right: Sequence[int],
        graded: Sequence[int],
        regimes: Sequence[str],
    ) -> bool:
        """Add the finished groups of a step. True when the curriculum moves up.

        One value a group: its prompt, its number of right and of graded answers, and its regime.
        """
        if self.stream.dataset.size is not None:  # prompts of endless data are not drawn again
            for prompt, r, g, regime in zip(prompts, right, graded, regimes, strict=True):
                self.history.update(prompt.prompt_id, r, g, regime, step)
        if self.curriculum is None:
            return False
        rates = [(p.level, r / g) for p, r, g in zip(prompts, right, graded, strict=True) if g]
        return self.curriculum.update([level for level, _ in rates], [rate for _, rate in rates])

    def state(self) -> dict[str, Any]:
        """The state as JSON-able values, for `restore`."""
        return {
            "stream": self.stream.state(),
            "history": self.history.state_dict(),
            "curriculum": self.curriculum.state_dict() if self.curriculum else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`. ValueError if it is of other data or another seed."""
        self.stream.restore(state["stream"])
        self.history = PromptHistory.from_state(state["history"])
        if self.curriculum and state["curriculum"]:
            self.curriculum.load_state_dict(state["curriculum"])
