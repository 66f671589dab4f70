"""Which prompts come next: uniform, balanced by what is known of them, by level; the same again
after a resume.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from actors.data.prompt import make_prompt
from actors.data.sampler import Sampler
from actors.data.stream import Dataset
from conf.schema import DataConfig


def dataset(size: int | None = 40, levels: int = 2) -> Dataset:
    def get(i: int) -> Any:
        return make_prompt(
            f"q{i}", str(i), "short", data_source="t", task="math", level=1 + i % levels
        )

    return Dataset("t", size, get)


def sampler(size: int | None = 40, seed: int = 0, levels: int = 2, **data: Any) -> Sampler:
    return Sampler(DataConfig(**data), dataset(size, levels), seed)


def test_uniform_is_the_stream_itself() -> None:
    plain = sampler()
    assert sorted(p.question for p in plain.next(40)) == sorted(f"q{i}" for i in range(40))


def test_balanced_draws_by_the_variance_of_the_pass_rate() -> None:
    """Known pass rates: half the prompts always solved, half solved half the time. Chances: floor
    against 1.
    """
    balanced = sampler(sampler="balanced", sampler_floor=0.2)
    prompts = balanced.next(40)  # nothing is known: all are taken
    assert len({p.prompt_id for p in prompts}) == 40
    for visit in range(12):
        for p in prompts:
            easy = p.level == 1
            balanced.update(
                visit, [p], [800 if easy else 400], [800], ["saturated" if easy else "learnable"]
            )
    assert balanced.acceptance(prompts[0]) == pytest.approx(
        0.2 if prompts[0].level == 1 else 1.0, abs=0.01
    )
    drawn = balanced.next(2000)
    share = np.mean([p.level == 1 for p in drawn])
    assert share == pytest.approx(0.2 / 1.2, abs=0.03)  # standard error 0.008


def test_curriculum_opens_levels_in_turn_and_replays_lower_ones() -> None:
    steps = sampler(
        None,
        levels=3,
        curriculum=[2, 1, 3],
        curriculum_window=4,
        curriculum_up=0.75,
        curriculum_replay=0.25,
    )
    assert {p.level for p in steps.next(50)} == {1}
    first = steps.next(4)
    assert not steps.update(1, first, [4, 4, 0, 3], [4, 4, 4, 4], ["learnable"] * 4)  # mean 11/16
    assert steps.update(2, first, [4, 4, 1, 3], [4, 4, 4, 4], ["learnable"] * 4)  # exactly 0.75
    drawn = [p.level for p in steps.next(1500)]
    assert set(drawn) == {1, 2}
    assert np.mean(np.array(drawn) == 1) == pytest.approx(0.25 / 1.25, abs=0.04)
    assert steps.history.entries == {}  # endless: nothing comes again


def test_ungraded_groups_move_no_curriculum() -> None:
    steps = sampler(None, levels=2, curriculum=[1, 2], curriculum_window=1)
    assert not steps.update(1, steps.next(1), [0], [0], ["undetermined"])
    assert steps.curriculum.recent == []


def test_a_level_that_no_prompt_has_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"data.curriculum=\[7\].*of level 7.*name levels that the data set has"
    ):
        sampler(curriculum=[7]).next(1)


def test_a_resumed_sampler_draws_what_the_other_would_have_drawn() -> None:
    def step(s: Sampler, n: int) -> list[str]:
        drawn = s.next(8)
        s.update(n, drawn, [n % 5] * 8, [4] * 8, ["learnable"] * 8) if n % 5 <= 4 else None
        return [p.prompt_id for p in drawn]

    settings = {
        "sampler": "balanced",
        "curriculum": [1, 2],
        "curriculum_window": 8,
        "curriculum_up": 0.5,
    }
    one = sampler(seed=3, **settings)
    for n in range(4):
        step(one, n)
    saved = json.loads(json.dumps(one.state()))
    rest = [step(one, n) for n in range(4, 9)]
    two = sampler(seed=3, **settings)
    two.restore(saved)
    assert [step(two, n) for n in range(4, 9)] == rest
