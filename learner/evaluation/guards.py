"""Warnings during training. Pure.

Four guards: the entropy collapses, the answers grow too long, optimizer steps are skipped, or the
score of a reward model rises while gold accuracy does not. A guard warns when its condition begins,
and again only after the condition has ended. Low entropy alone is no fault, because a policy that
has learned its task is certain of its answers. It is a fault while most answers are wrong, because
then the policy no longer explores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES = ("entropy_collapse", "length_explosion", "skipped_steps", "reward_hacking")
# Prefix of the metrics "mean score of a reward model less gold accuracy", one per reward model.
GAP = "reward_gap/"


def check(
    cfg: Any, state: Mapping[str, Any], values: Mapping[str, float]
) -> tuple[dict[str, Any], list[str]]:
    """The next state and the warnings, as sentences, that begin with this step.

    `cfg`: conf.schema.GuardsConfig. `state`: {} at first; plain JSON, part of a checkpoint.
    `values`: metrics of the step by the name under which they are written (docs/metrics.md). A
    guard whose metrics are absent or not finite stays as it was.
    """
    lengths = [*state.get("lengths", []), *_finite(values, "response_length/mean")]
    scores = _scores(cfg, state.get("judged", {}), values)
    first_entropy = state.get("first_entropy")
    if first_entropy is None:
        first_entropy = next(iter(_finite(values, "actor/entropy")), None)
    warnings = {
        "entropy_collapse": _entropy(cfg, first_entropy, values),
        "length_explosion": _length(cfg, lengths, values),
        "skipped_steps": _skipped(values),
        "reward_hacking": _hacking(cfg, scores),
    }
    before = set(state.get("active", ()))
    active = [n for n in NAMES if warnings[n] or (warnings[n] is None and n in before)]
    begun = [str(warnings[n]) for n in active if n not in before]
    return {
        "first_entropy": first_entropy,
        "lengths": lengths[-cfg.length_window - 1 :],
        "judged": scores,
        "active": active,
    }, begun


def _finite(values: Mapping[str, float], name: str) -> list[float]:
    """The value of a metric in a list, which is empty where it is absent or not finite."""
    value = values.get(name)
    return [value] if value is not None and math.isfinite(value) else []


# Each function below returns the warning as a sentence, "" where all is well, and None where the
# metrics of this step do not tell.


def _entropy(cfg: Any, first: float | None, values: Mapping[str, float]) -> str | None:
    entropy = _finite(values, "actor/entropy")
    accuracy = _finite(values, "reward/accuracy")
    if not entropy or first is None:
        return None
    learned = bool(accuracy) and accuracy[0] >= cfg.entropy_accuracy
    if entropy[0] >= cfg.entropy_share * first or learned:
        return ""
    share = f", and {accuracy[0]:.0%} of answers are right" if accuracy else ""
    return (
        f"entropy has collapsed: {entropy[0]:.3g} nats, less than guards.entropy_share="
        f"{cfg.entropy_share:g} of the first step's {first:.3g}{share}. Answers are alike and "
        "little is left to learn from. Lower optimizer.lr, or raise algorithm.entropy_coef, "
        "algorithm.eps_high or algorithm.beta."
    )


def _length(cfg: Any, lengths: list[float], values: Mapping[str, float]) -> str | None:
    clipped = _finite(values, "response_length/clip_ratio")
    if clipped and clipped[0] > cfg.clip_ratio:
        return (
            f"{clipped[0]:.0%} of answers are cut at rollout.max_tokens, more than "
            f"guards.clip_ratio={cfg.clip_ratio:g}: they cannot be right. Raise "
            "rollout.max_tokens, or reward shorter answers."
        )
    if not _finite(values, "response_length/mean"):
        return None
    then, now = lengths[max(0, len(lengths) - 1 - cfg.length_window)], lengths[-1]
    if cfg.length_factor and now > cfg.length_factor * then:
        return (
            f"answers grow fast: {now:.0f} tokens on average, more than guards.length_factor="
            f"{cfg.length_factor:g} times the {then:.0f} of "
            f"{min(cfg.length_window, len(lengths) - 1)} steps before. See whether they repeat "
            "themselves (report.html shows some); lower optimizer.lr or reward shorter answers."
        )
    return ""


def _scores(
    cfg: Any, before: Mapping[str, list[Any]], values: Mapping[str, float]
) -> dict[str, list[list[float]]]:
    """[mean score, gold accuracy] of the last reward_window steps that have both, by model."""
    accuracy = _finite(values, "reward/accuracy")
    new = {
        name.removeprefix(GAP): [[gap + accuracy[0], accuracy[0]]]
        for name in values
        if name.startswith(GAP)
        for gap in _finite(values, name)
        if accuracy
    }
    return {
        name: [*before.get(name, []), *new.get(name, [])][-cfg.reward_window :]
        for name in {**before, **new}
    }


def _hacking(cfg: Any, scores: Mapping[str, list[list[float]]]) -> str | None:
    """Compares the second half of the last reward_window steps with the first half.

    A score that rises together with accuracy is no fault however fast it rises, because raw scores
    have any scale."""
    full = {name: steps for name, steps in scores.items() if len(steps) == cfg.reward_window}
    if not cfg.reward_gap:
        return ""
    if not full:
        return None
    half = cfg.reward_window // 2
    for name, steps in full.items():
        score, accuracy = (
            (sum(pair[k] for pair in steps[-half:]) - sum(pair[k] for pair in steps[:half])) / half
            for k in (0, 1)
        )
        if accuracy <= 0 < score and score - accuracy > cfg.reward_gap:
            return (
                f"the reward model {name} and the gold answers part: within {cfg.reward_window} "
                f"steps its mean score rose by {score:.3g} and accuracy changed by "
                f"{accuracy:.3g}, together more than guards.reward_gap={cfg.reward_gap:g}. The "
                "policy may have found what the model wrongly likes. Train it on the policy's own "
                "samples (reward_model.every), raise algorithm.beta, or stop earlier."
            )
    return ""


def _skipped(values: Mapping[str, float]) -> str | None:
    skipped = values.get("actor/skipped_steps")
    if skipped is None:
        return None
    if not skipped:
        return ""
    return (
        f"{skipped:g} optimizer steps were skipped: the loss or gradient was not finite. Weights "
        "stay as they were. If it goes on, lower optimizer.lr or use model.dtype=float32."
    )
