"""Which actors a run has, worked out by hand for each stage."""

from __future__ import annotations

import pytest

from cluster.roster import PLACED, ROLES, Role, count, has_reference, roster
from learner.main import load

REWARD_MODEL = ["reward=orm", "reward.models.orm.path=some/orm"]
REFRESHED = [*REWARD_MODEL, "reward_model.refresh=orm", "reward_model.every=5"]


def counts(*arguments: str) -> dict[str, int]:
    return {role.name: role.count for role in roster(load([*arguments]))}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ["experiment=r1_zero", "learner.ranks=2", "generator.count=3", "reference.count=2"],
            {"learner": 2, "generator": 3, "reference": 2, "rewards": 1, "rollout_writer": 1},
        ),
        (
            ["experiment=r1_zero", "algorithm.beta=0", "logging.rollouts=0"],
            {"learner": 1, "generator": 1, "rewards": 1},
        ),
        (
            ["experiment=r1_zero", "algorithm.beta=0", *REWARD_MODEL, "reward_model.count=2"],
            {"learner": 1, "reward_model": 2, "generator": 1, "rewards": 1, "rollout_writer": 1},
        ),
        (
            ["experiment=r1_zero", "algorithm.beta=0", *REFRESHED, "learner.ranks=2"],
            {
                "learner": 2,
                "reward_learner": 2,
                "reward_model": 1,
                "generator": 1,
                "rewards": 1,
                "rollout_writer": 1,
            },
        ),
        (["experiment=pretrain_tiny"], {"learner": 1}),
        (
            ["experiment=train_orm"],
            {"learner": 1, "reward_learner": 1, "generator": 1, "rewards": 1},
        ),
        (
            ["experiment=train_orm", "reward_model.source=files", "reward_model.path=tests"],
            {"reward_learner": 1},
        ),
        (["experiment=annotate_steps"], {"learner": 1, "generator": 1, "rewards": 1}),
    ],
)
def test_the_roles_of_each_stage(arguments: list[str], expected: dict[str, int]) -> None:
    assert counts(*arguments) == expected


def test_a_stage_that_does_not_train_the_policy_on_answers_has_no_reference() -> None:
    kl_term = ["algorithm.beta=0.1", "algorithm.kl_placement=loss"]
    for experiment in ("annotate_steps", "pretrain_tiny", "train_orm"):
        assert not has_reference(load([f"experiment={experiment}", *kl_term]))
    assert has_reference(load(["experiment=r1_zero", *kl_term]))


def test_a_role_has_what_its_settings_say() -> None:
    cfg = load(["experiment=r1_zero", "generator.cpus=1.5", "generator.gpus=0.5"])
    assert Role("generator", 1, cpus=1.5, gpus=0.5) in roster(cfg)
    assert count(cfg, "generator") == 1 and count(cfg, "reward_learner") == 0


def test_every_role_is_known_and_those_that_reserve_nothing_have_no_place() -> None:
    cfg = load(["experiment=r1_zero", *REFRESHED, "algorithm.beta=0.1"])
    assert {role.name for role in roster(cfg)} == set(ROLES)
    assert set(ROLES) - set(PLACED) == {"rollout_writer"}
    assert [role.cpus for role in roster(cfg) if role.name not in PLACED] == [0.0]
