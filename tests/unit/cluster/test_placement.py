"""What a run reserves, and what is said where a cluster has no room for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.placement import Bundle, bundles, check, shortage, total
from conf.schema import ConfigError
from learner.main import load


def amounts(*overrides: str) -> list[tuple[str, int, dict[str, float]]]:
    return [
        (b.role, b.index, b.resources) for b in bundles(load(["experiment=r1_zero", *overrides]))
    ]


def test_a_bundle_for_each_actor() -> None:
    found = amounts(
        "generator.count=2",
        "generator.cpus=1.5",
        "learner.ranks=2",
        "learner.gpus=1",
        "algorithm.beta=0.1",
        "+cluster.resources.generator={big: 0.5}",
    )
    assert found == [
        ("learner", 0, {"CPU": 1.0, "GPU": 1.0}),
        ("learner", 1, {"CPU": 1.0, "GPU": 1.0}),
        ("generator", 0, {"CPU": 1.5, "big": 0.5}),
        ("generator", 1, {"CPU": 1.5, "big": 0.5}),
        ("reference", 0, {"CPU": 0.5}),
        ("rewards", 0, {"CPU": 0.5}),
    ]


def test_what_needs_nothing_reserves_nothing() -> None:
    assert [role for role, *_ in amounts("algorithm.beta=0", "generator.cpus=0")] == [
        "learner",
        "rewards",
    ]
    assert [b.role for b in bundles(load(["experiment=pretrain_tiny"]))] == ["learner"]


def test_reward_models_and_their_learner_have_places_where_there_are_any() -> None:
    def roles(*argv: str) -> list[str]:
        return [b.role for b in bundles(load([*argv]))]

    assert roles("experiment=train_orm") == ["learner", "reward_learner", "generator", "rewards"]
    assert roles(
        "experiment=train_orm", "reward_model.source=files", "reward_model.path=tests"
    ) == ["reward_learner"]
    assert roles("experiment=deepseekmath_iterative", "reward_model.count=2") == [
        "learner",
        "reward_learner",
        "reward_model",
        "reward_model",
        "generator",
        "reference",
        "rewards",
    ]
    assert roles(
        "experiment=r1_zero", "reward=orm", "reward.models.orm.path=a/b", "algorithm.beta=0"
    ) == ["learner", "reward_model", "generator", "rewards"]


def test_cpu_and_gpu_come_first() -> None:
    assert total([{"a": 1.0, "CPU": 1.0}, {"GPU": 0.5, "CPU": 0.25}]) == {
        "CPU": 1.25,
        "GPU": 0.5,
        "a": 1.0,
    }
    assert list(total([{"a": 1.0, "GPU": 1.0, "CPU": 1.0}])) == ["CPU", "GPU", "a"]


WANTED = [
    Bundle("learner", 0, {"CPU": 1.0}),
    *[Bundle("generator", i, {"CPU": 2.0, "big": 1.0}) for i in range(3)],
]


def test_need_and_have_are_named() -> None:
    text = shortage(
        WANTED, [{"CPU": 4.0, "memory": 9.0}, {"CPU": 2.0, "big": 1.0}], {"CPU": 5.0, "big": 1.0}
    )
    assert text == (
        "needs CPU 7, big 3: 1 x learner (CPU 1), 3 x generator (CPU 2, big 1). "
        "Free are CPU 5, big 1, on nodes that have CPU 4, big 0 | CPU 2, big 1: "
        "short of CPU 2, big 2."
    )


def test_enough_in_all_but_in_the_wrong_place() -> None:
    text = shortage(
        [replace(WANTED[1], resources={"CPU": 3.0})],
        [{"CPU": 2.0}] * 9,
        {"CPU": 18.0},
        "STRICT_PACK",
    )
    assert "short" not in text and "cluster.strategy=STRICT_PACK" in text and "3 more" in text


@pytest.mark.parametrize(
    "value",
    [
        "trainer={big: 1}",
        "generator=3",
        "generator={big: 0}",
        "learner={CPU: 4}",
        "learner={big: many}",
    ],
)
def test_resources_that_cannot_be_meant(value: str) -> None:
    with pytest.raises(ConfigError, match="cluster.resources=.*expected a role"):
        load(["experiment=r1_zero", f"+cluster.resources.{value}"])
    check({"generator": {"big": 0.5}})
