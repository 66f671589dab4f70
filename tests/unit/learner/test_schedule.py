"""Learning rates, by hand."""

from __future__ import annotations

import math

import pytest

from conf.schema import OptimizerConfig
from learner.algorithms.schedule import learning_rate


def test_warm_up_then_constant() -> None:
    cfg = OptimizerConfig(lr=4e-4, warmup_steps=4)
    found = [learning_rate(cfg, s, 100) for s in range(6)]
    assert found == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])


def test_cosine_from_the_full_rate_to_zero() -> None:
    cfg = OptimizerConfig(lr=2.0, warmup_steps=2, decay="cosine")
    assert learning_rate(cfg, 2, 10) == pytest.approx(2.0)
    assert learning_rate(cfg, 6, 10) == pytest.approx(1.0)
    assert learning_rate(cfg, 8, 10) == pytest.approx(1 + math.cos(0.75 * math.pi))
    assert learning_rate(cfg, 10, 10) == pytest.approx(0.0)
    assert learning_rate(cfg, 99, 10) == pytest.approx(0.0)  # never negative, never up again


def test_no_warm_up_and_a_run_shorter_than_its_warm_up() -> None:
    assert learning_rate(OptimizerConfig(lr=1.0), 0, 1) == 1.0
    cfg = OptimizerConfig(lr=1.0, warmup_steps=10, decay="cosine")
    assert [learning_rate(cfg, s, 3) for s in range(3)] == pytest.approx([0.1, 0.2, 0.3])
