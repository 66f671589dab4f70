"""Joins the rewards of the rules with the scores of the reward models. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from actors.records import SCORED

# An answer with several verdicts gets the status that comes last in this order.
STATUSES = ("ok", "ungradable", "timeout", "error")


@dataclass(frozen=True)
class ModelScore:
    """The score of one reward model for one answer. `score` is None unless the status is "ok".

    `steps` is set for a process model only: the scores of the steps, and the index in the
    completion of each step's last token. The answer's score is then the minimum over its steps
    (Math-Shepherd, arXiv:2312.08935, section 3.4).
    """

    status: str
    score: float | None
    reason: str = ""
    steps: tuple[list[float], list[int]] | None = None


def rule_weights(rules: Mapping[str, float], models: Mapping[str, Any]) -> dict[str, float]:
    """The weights of reward.rules without those of reward models.

    With reward models the rule accuracy is always included, with weight 0 if the settings do not
    name it: the scores of the models can then be compared with the correctness of the answers.
    """
    default = {"accuracy": 0.0} if models else {}
    return default | {name: weight for name, weight in rules.items() if name not in models}


def join(
    rules: pa.RecordBatch,
    verdicts: Sequence[Mapping[str, ModelScore]],
    weights: Mapping[str, float],
    method: str,
    supervisor: str = "",
) -> pa.RecordBatch:
    """The SCORED record that combines rules and reward models.

    `rules` is the SCORED record of the rules alone. `verdicts` has one mapping per row, from the
    name of a model to its score. `weights` are those of the models, and `method` is "sum" or
    "product", as in reward.combine. An answer is "ok" only if every verdict with a weight other
    than 0 is.

    `supervisor` names a process model that rewards the single steps (process supervision,
    DeepSeekMath, arXiv:2402.03300, section 4.1.3): each step is rewarded with its weighted score,
    and the last step, where the answer ends, also receives the sum of all other rewards.
    """
    rows = rules.to_pylist()
    for row, scores in zip(rows, verdicts, strict=True):
        counted = [name for name in scores if weights.get(name)]
        bad = [
            (scores[n].status, f"{n}: {scores[n].reason}")
            for n in counted
            if scores[n].status != "ok"
        ]
        row["parts"] = [
            *row["parts"],
            *((n, v.score) for n, v in scores.items() if v.score is not None),
        ]
        row["reason"] = "; ".join(filter(None, [row["reason"], *(reason for _, reason in bad)]))
        row["status"] = max([row["status"], *(status for status, _ in bad)], key=STATUSES.index)
        if row["status"] != "ok":
            row.update(reward=None, step_rewards=None, step_ends=None)
            continue
        terms = {n: weights[n] * scores[n].score for n in counted}
        total = row["reward"]
        row["reward"] = (
            math.fsum([total, *terms.values()])
            if method == "sum"
            else math.prod([total, *terms.values()])
        )
        if supervisor in terms:
            step_scores, ends = scores[supervisor].steps
            steps = [weights[supervisor] * score for score in step_scores]
            steps[-1] += row["reward"] - terms[supervisor]
            row.update(step_rewards=steps, step_ends=ends)
    return pa.RecordBatch.from_pylist(rows, schema=SCORED)
