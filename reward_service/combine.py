"""Rules and reward models as one reward. Pure: SCORED records of the rules and verdicts of models in, SCORED out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from actors.records import SCORED

WORST = (
    "ok",
    "ungradable",
    "timeout",
    "error",
)  # of several verdicts on one answer the last in this order counts


@dataclass(frozen=True)
class ModelScore:
    """What one model says of one answer. `score` is None unless status is "ok"; `steps`: (scores, indices into the
    completion) of a process model, whose score is the minimum (Math-Shepherd, 2312.08935, section 3.4)."""

    status: str
    score: float | None
    reason: str = ""
    steps: tuple[list[float], list[int]] | None = None


def rule_weights(rules: Mapping[str, float], models: Mapping[str, Any]) -> dict[str, float]:
    """Weights of what is a rule. With models the rule accuracy is always among them, of weight 0 where nobody asked:
    what a model calls good is then seen beside what is right."""
    return ({"accuracy": 0.0} if models else {}) | {
        n: w for n, w in rules.items() if n not in models
    }


def join(
    rules: pa.RecordBatch,
    verdicts: Sequence[Mapping[str, ModelScore]],
    weights: Mapping[str, float],
    how: str,
    supervisor: str = "",
) -> pa.RecordBatch:
    """SCORED of rules and models. `rules`: SCORED of the rules alone; `verdicts`: of each row by name of the model;
    `weights`: of the models; `how`: sum or product, as reward.combine.

    An answer is ok only if everything of weight other than 0 is. `supervisor` names a process model that rewards the
    single steps (process supervision, DeepSeekMath 4.1.3): the weighted score of each, and on the last of them, where
    the answer ends, what the other rewards add up to."""
    rows = rules.to_pylist()
    for row, found in zip(rows, verdicts, strict=True):
        counted = [name for name in found if weights.get(name)]
        bad = [
            (found[n].status, f"{n}: {found[n].reason}") for n in counted if found[n].status != "ok"
        ]
        row["parts"] = [
            *row["parts"],
            *((n, v.score) for n, v in found.items() if v.score is not None),
        ]
        row["reason"] = "; ".join(filter(None, [row["reason"], *(reason for _, reason in bad)]))
        row["status"] = max([row["status"], *(status for status, _ in bad)], key=WORST.index)
        if row["status"] != "ok":
            row.update(reward=None, step_rewards=None, step_ends=None)
            continue
        terms = {n: weights[n] * found[n].score for n in counted}
        total = row["reward"]
        row["reward"] = (
            math.fsum([total, *terms.values()])
            if how == "sum"
            else math.prod([total, *terms.values()])
        )
        if supervisor in terms:
            scores, ends = found[supervisor].steps
            steps = [weights[supervisor] * s for s in scores]
            steps[-1] += row["reward"] - terms[supervisor]
            row.update(step_rewards=steps, step_ends=ends)
    return pa.RecordBatch.from_pylist(rows, schema=SCORED)
