"""The one entry to all advantage functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.algorithms.advantages.sample_level import SAMPLE_LEVEL, dpo
from learner.algorithms.advantages.token_level import TOKEN_LEVEL, Ragged, TokenInputs


def names() -> tuple[str, ...]:
    """All values of algorithm.advantage."""
    return (*SAMPLE_LEVEL, *TOKEN_LEVEL, "dpo")


def compute(
    cfg: Any,
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray,
    *,
    lengths: np.ndarray | None = None,
    kl: Sequence[np.ndarray] | np.ndarray | None = None,
    step_rewards: Sequence[np.ndarray] | None = None,
    step_ends: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
    log_ratios: np.ndarray | None = None,
) -> np.ndarray | Ragged:
    """Advantages by ``cfg.advantage`` (AlgorithmConfig): float64 [N], or a ragged list for a
    token-level one.

    The arguments are the fields of `TokenInputs`, and ``log_ratios`` for `dpo`. With
    kl_placement=reward and beta > 0, ``kl`` holds k1 per token (ragged); for a sample-level
    advantage its sums [N] will do. For `dpo` the chosen answer of a pair is the one with
    reward > 0. Raises ValueError naming the setting when an input it needs is missing."""
    name, kl_in_reward = cfg.advantage, cfg.kl_placement == "reward" and cfg.beta > 0
    if name not in names():
        raise ValueError(
            f"algorithm.advantage={name!r} is not known: expected one of {', '.join(names())}"
        )
    valid = np.asarray(valid, dtype=bool)
    inputs = TokenInputs(
        rewards,
        groups,
        valid,
        lengths,
        kl if kl_in_reward else None,
        step_rewards,
        step_ends,
        values,
    )
    needs = TOKEN_LEVEL[name].needs if name in TOKEN_LEVEL else ()
    missing = [field for field in needs if getattr(inputs, field) is None]
    if kl_in_reward and kl is None and name != "dpo":
        missing.append("kl")
    if name == "dpo" and log_ratios is None:
        missing.append("log_ratios")
    if missing:
        raise ValueError(
            f"algorithm.advantage={name} (kl_placement={cfg.kl_placement}, beta={cfg.beta}) needs "
            f"{' and '.join(missing)}"
        )
    if name == "dpo":
        return dpo(log_ratios, np.asarray(rewards) > 0, groups, cfg.beta)
    if name in TOKEN_LEVEL:
        return TOKEN_LEVEL[name].function(cfg, inputs)
    if kl_in_reward:
        rewards = np.asarray(rewards) - cfg.beta * np.array([np.sum(k) for k in kl])
    if name == "grpo" and not cfg.std_normalise:
        name = "dr_grpo"  # GRPO without the division by the std of the group
    return SAMPLE_LEVEL[name](rewards, groups, valid)
