"""The parts an algorithm may be made of, and which of them go together. Pure.

An algorithm is a data source, an advantage function, a loss function, a KL term with its place and
a normaliser (DeepSeekMath, 2402.03300, section 5.2). `conf/algorithm/NAME.yaml` names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from learner.algorithms import advantages, kl, losses, regimes

# algorithm.data: where the answers come from, in words.
DATA = {
    "dataset": "data set of answers",
    "sft_samples": "samples of the SFT model",
    "pairs": "pairs of answers",
    "policy": "current policy",
}
# Keys of algorithm.options with their meaning. Any other key is refused.
OPTIONS = {
    "critic_lr": "constant learning rate of the critic; null, the default: `optimizer.lr`",
    "value_clip": (
        "range of the critic's clip around its old values; null, the default: no clip (`ppo`: 0.2)"
    ),
    "value_lam": "lambda of the critic's targets; by default that of the advantages, `lam`",
    "value_pretrain_steps": "number of first steps that train the critic alone; default 0",
    "overlong_share": (
        "last share of `rollout.max_tokens` over which DAPO's penalty falls from 0 to -1 "
        "(`dapo`: 0.2)"
    ),
    "dead_weight": "weight of a dead group with `filter=down_weight`; default 0.1",
    "max_draws": (
        "with `filter=resample`, the most groups drawn in a step, as a multiple of "
        "`rollout.prompts_per_step`; default 4"
    ),
}


def check(cfg: Any) -> None:
    """Raise ValueError where a part of `cfg` (AlgorithmConfig) is unknown or does not fit another.

    The message names the setting."""
    for key, value, known in (
        ("advantage", cfg.advantage, advantages.names()),
        ("loss", cfg.loss, tuple(losses.LOSSES)),
        ("normaliser", cfg.normaliser, losses.NORMALISERS),
        ("kl", cfg.kl, kl.KINDS),
        ("data", cfg.data, tuple(DATA)),
        ("filter", cfg.filter, regimes.FILTERS),
        *((f"options.{key}", key, tuple(OPTIONS)) for key in cfg.options),
    ):
        if value not in known:
            raise ValueError(
                f"algorithm.{key}={value!r} is not known: expected one of {', '.join(known)}"
            )
    for wrong, setting, reason in (*_misfits(cfg), *_out_of_range(cfg)):
        if wrong:
            raise ValueError(f"algorithm.{setting}: {reason}")


def _misfits(cfg: Any) -> Iterator[tuple[bool, str, str]]:
    """(whether it is wrong, the setting, the reason) of every pair of parts that must agree."""
    yield (
        cfg.beta > 0 and cfg.kl_placement == "loss" and cfg.kl == "k1",
        "kl=k1 with kl_placement=loss",
        "its gradient has mean 0; use k2 or k3 there, or kl_placement=reward",
    )
    yield (
        cfg.beta > 0 and cfg.kl_placement == "reward" and cfg.kl != "k1",
        f"kl={cfg.kl} with kl_placement=reward",
        "in the reward only k1 follows the reverse KL; set algorithm.kl=k1",
    )
    yield (
        (cfg.advantage == "gae") != cfg.critic,
        f"critic={cfg.critic} with advantage={cfg.advantage}",
        "advantage=gae needs algorithm.critic=true, and nothing else uses a critic",
    )
    yield (
        (cfg.advantage == "dpo") != (cfg.data == "pairs"),
        f"data={cfg.data} with advantage={cfg.advantage}",
        "advantage=dpo and data=pairs belong together",
    )
    yield (
        cfg.advantage == "dpo" and not cfg.beta > 0,
        f"beta={cfg.beta} with advantage=dpo",
        "expected more than 0",
    )
    yield (
        cfg.advantage == "dr_grpo" and cfg.std_normalise,
        "std_normalise=true with advantage=dr_grpo",
        "Dr. GRPO does not divide by the std; use advantage=grpo or set "
        "algorithm.std_normalise=false",
    )


def _out_of_range(cfg: Any) -> Iterator[tuple[bool, str, str]]:
    """(whether it is wrong, the setting, the reason) of every number with bounds."""
    yield (
        cfg.dual_clip is not None and not cfg.dual_clip > 1 + cfg.eps_high,
        f"dual_clip={cfg.dual_clip}",
        f"expected more than 1 + eps_high = {1 + cfg.eps_high}, or null",
    )
    yield (
        cfg.tis_cap is not None and not cfg.tis_cap > 0,
        f"tis_cap={cfg.tis_cap}",
        "expected more than 0, or null",
    )
    for key, value in (("gamma", cfg.gamma), ("lam", cfg.lam)):
        yield not 0 <= value <= 1, f"{key}={value}", "expected in [0, 1]"
