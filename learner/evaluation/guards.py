"""Warnings while a run goes on: entropy that collapses, answers that explode, steps that are skipped, a reward model
whose score rises while gold accuracy does not. Pure.

Each is told when it begins and not again before it has ended. Low entropy alone is no fault: a policy that has learned
a task is sure of it. It is one while most answers are wrong, because then nothing new is found any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES = ("entropy_collapse", "length_explosion", "skipped_steps", "reward_hacking")
GAP = "reward_gap/"  # metric: mean score of a reward model less gold accuracy


def check(
    cfg: Any, state: Mapping[str, Any], values: Mapping[str, float]
) -> tuple[dict[str, Any], list[str]]:
    """(next state, sentences of what begins now) after one step.

    `cfg`: conf.schema.GuardsConfig. `state`: {} at first, plain JSON, part of a checkpoint. `values`: metrics of the
    step by written name (cluster/monitoring/metrics.py); a guard whose metrics are absent or not finite keeps its state.
    """
    lengths = [*state.get("lengths", []), *_known(values, "response_length/mean")]
    judged = _judged(cfg, state.get("judged", {}), values)
    first = state.get("first_entropy")
    if first is None:
        first = next(iter(_known(values, "actor/entropy")), None)
    found = {
        "entropy_collapse": _entropy(cfg, first, values),
        "length_explosion": _length(cfg, lengths, values),
        "skipped_steps": _skipped(values),
        "reward_hacking": _hacking(cfg, judged),
    }
    before = set(state.get("active", ()))
    active = [n for n in NAMES if found[n] or (found[n] is None and n in before)]
    begun = [str(found[n]) for n in active if n not in before]
    return {
        "first_entropy": first,
        "lengths": lengths[-cfg.length_window - 1 :],
        "judged": judged,
        "active": active,
    }, begun


def _known(values: Mapping[str, float], name: str) -> list[float]:
    value = values.get(name)
    return [value] if value is not None and math.isfinite(value) else []


def _entropy(cfg: Any, first: float | None, values: Mapping[str, float]) -> str | None:
    """A sentence, "" where all is well, None where nothing is known."""
    entropy, right = _known(values, "actor/entropy"), _known(values, "reward/accuracy")
    if not entropy or first is None:
        return None
    if entropy[0] >= cfg.entropy_share * first or (right and right[0] >= cfg.entropy_accuracy):
        return ""
    seen = f", and {right[0]:.0%} of answers are right" if right else ""
    return (
        f"entropy has collapsed: {entropy[0]:.3g} nats, less than guards.entropy_share={cfg.entropy_share:g} of "
        f"the first step's {first:.3g}{seen}. Answers are alike and little is left to learn from. Lower "
        "optimizer.lr, or raise algorithm.entropy_coef, algorithm.eps_high or algorithm.beta."
    )


def _length(cfg: Any, lengths: list[float], values: Mapping[str, float]) -> str | None:
    clipped = _known(values, "response_length/clip_ratio")
    if clipped and clipped[0] > cfg.clip_ratio:
        return (
            f"{clipped[0]:.0%} of answers are cut at rollout.max_tokens, more than guards.clip_ratio="
            f"{cfg.clip_ratio:g}: they cannot be right. Raise rollout.max_tokens, or reward shorter answers."
        )
    if not _known(values, "response_length/mean"):
        return None
    then, now = lengths[max(0, len(lengths) - 1 - cfg.length_window)], lengths[-1]
    if cfg.length_factor and now > cfg.length_factor * then:
        return (
            f"answers grow fast: {now:.0f} tokens on average, more than guards.length_factor="
            f"{cfg.length_factor:g} times the {then:.0f} of {min(cfg.length_window, len(lengths) - 1)} steps "
            "before. See whether they repeat themselves (report.html shows some); lower optimizer.lr or reward "
            "shorter answers."
        )
    return ""


def _judged(
    cfg: Any, before: Mapping[str, list[Any]], values: Mapping[str, float]
) -> dict[str, list[list[float]]]:
    """[mean score, gold accuracy] of the last reward_window steps that have both, by reward model."""
    right = _known(values, "reward/accuracy")
    new = {
        name.removeprefix(GAP): [[gap + right[0], right[0]]]
        for name in values
        if name.startswith(GAP)
        for gap in _known(values, name)
        if right
    }
    return {
        name: [*before.get(name, []), *new.get(name, [])][-cfg.reward_window :]
        for name in {**before, **new}
    }


def _hacking(cfg: Any, judged: Mapping[str, list[list[float]]]) -> str | None:
    """Of the last reward_window steps the second half against the first. A score that rises with accuracy is no fault
    however fast it does: raw scores have any scale."""
    full = {name: j for name, j in judged.items() if len(j) == cfg.reward_window}
    if not full or not cfg.reward_gap:
        return "" if not cfg.reward_gap else None
    half = cfg.reward_window // 2
    for name, j in full.items():
        score, right = (
            (sum(pair[k] for pair in j[-half:]) - sum(pair[k] for pair in j[:half])) / half
            for k in (0, 1)
        )
        if right <= 0 < score and score - right > cfg.reward_gap:
            return (
                f"the reward model {name} and the gold answers part: within {cfg.reward_window} steps its mean "
                f"score rose by {score:.3g} and accuracy changed by {right:.3g}, together more than "
                f"guards.reward_gap={cfg.reward_gap:g}. The policy may have found what the model wrongly "
                "likes. Train it on the policy's own samples (reward_model.every), raise "
                "algorithm.beta, or stop earlier."
            )
    return ""


def _skipped(values: Mapping[str, float]) -> str | None:
    skipped = values.get("actor/skipped_steps")
    if skipped is None:
        return None
    return (
        skipped
        and (
            f"{skipped:g} optimizer steps were skipped: the loss or gradient was not finite. Weights stay "
            "as they were. If it goes on, lower optimizer.lr or use model.dtype=float32."
        )
        or ""
    )
