"""Advantage functions, float64 and pure: `compute` gives those that `algorithm.advantage` names.

A new sample-level advantage is one function in sample_level.py, a new token-level one is one
function in token_level.py.
"""

from learner.algorithms.advantages.by_name import compute, names
from learner.algorithms.advantages.group_statistics import GroupStats, group_stats
from learner.algorithms.advantages.sample_level import (
    SAMPLE_LEVEL,
    dpo,
    dr_grpo,
    grpo,
    overlong_penalty,
    reinforce_pp_baseline,
    rloo,
    sample_level,
)
from learner.algorithms.advantages.token_level import (
    TOKEN_LEVEL,
    Ragged,
    TokenInputs,
    explained_variance,
    gae,
    process,
    token_level,
    token_rewards,
    whiten,
)

__all__ = [
    "SAMPLE_LEVEL",
    "TOKEN_LEVEL",
    "GroupStats",
    "Ragged",
    "TokenInputs",
    "compute",
    "dpo",
    "dr_grpo",
    "explained_variance",
    "gae",
    "group_stats",
    "grpo",
    "names",
    "overlong_penalty",
    "process",
    "reinforce_pp_baseline",
    "rloo",
    "sample_level",
    "token_level",
    "token_rewards",
    "whiten",
]
