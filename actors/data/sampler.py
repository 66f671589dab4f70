"""Which prompts next: the stream of the data set, thinned by what is known of each prompt. Pure.

With `data.sampler=balanced` a prompt is taken with the chance `PromptHistory.acceptance` (1 at a pass rate of 0.5, less
on either side); with `data.curriculum` by its level. Whether it is taken is a function of (seed, cursor, what was seen
so far), all of which a checkpoint holds, so a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.data.history import Curriculum, PromptHistory
from actors.data.prompt import Prompt, stable_rng
from actors.data.stream import Dataset, PromptStream

TRIES = 2000  # prompts looked at for each one wanted, at most


class Sampler:
    """`data`: DataConfig (sampler, sampler_floor, curriculum, curriculum_*)."""

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
        """The next `n` prompts; moves the stream. Raises ValueError where no prompt is of the level asked for."""
        if self.data.sampler == "uniform" and self.curriculum is None:
            return self.stream.next(n)
        taken: list[Prompt] = []
        for _ in range(TRIES * n):
            if len(taken) == n:
                break
            luck = stable_rng("sampler", self.seed, self.stream.cursor).random()
            prompt = self.stream.next(1)[0]
            if luck < self.acceptance(prompt):
                taken.append(prompt)
        if len(taken) < n:
            level = self.curriculum.levels[self.curriculum.position] if self.curriculum else None
            raise ValueError(
                f"data.curriculum={list(self.data.curriculum)}: {TRIES * n} prompts of "
                f"{self.stream.dataset.name} held only {len(taken)} of level {level} or below; name "
                "levels that the data set has"
            )
        return taken

    def acceptance(self, prompt: Prompt) -> float:
        known = (
            self.history.acceptance(prompt.prompt_id, self.data.sampler_floor)
            if self.data.sampler == "balanced"
            else 1.0
        )
        return known * (self.curriculum.acceptance(prompt.level) if self.curriculum else 1.0)

    def update(
        self,
        step: int,
        prompts: Sequence[Prompt],
        right: Sequence[int],
        graded: Sequence[int],
        regimes: Sequence[str],
    ) -> bool:
        """Take in the finished groups of a step (right answers of graded ones); True when the curriculum moves up."""
        if self.stream.dataset.size is not None:  # prompts of endless data do not come again
            for prompt, r, g, regime in zip(prompts, right, graded, regimes, strict=True):
                self.history.update(prompt.prompt_id, r, g, regime, step)
        if self.curriculum is None:
            return False
        seen = [(p.level, r / g) for p, r, g in zip(prompts, right, graded, strict=True) if g]
        return self.curriculum.update([level for level, _ in seen], [rate for _, rate in seen])

    def state(self) -> dict[str, Any]:
        """What `restore` needs; JSON-able."""
        return {
            "stream": self.stream.state(),
            "history": self.history.state_dict(),
            "curriculum": self.curriculum.state_dict() if self.curriculum else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.stream.restore(state["stream"])
        self.history = PromptHistory.from_state(state["history"])
        if self.curriculum and state["curriculum"]:
            self.curriculum.load_state_dict(state["curriculum"])
