"""Rules and models as one reward, by hand: weights, statuses, process supervision."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from actors.records import SCORED, check_scored
from reward_service.combine import ModelScore, join, rule_weights


def rules(*rows: dict[str, Any]) -> pa.RecordBatch:
    base = {
        "group_id": 7,
        "reward": 1.0,
        "parts": [("accuracy", 1.0)],
        "accuracy": 1.0,
        "format": None,
        "status": "ok",
        "extracted": "5",
        "reason": "",
        "step_rewards": None,
        "step_ends": None,
    }
    return pa.RecordBatch.from_pylist(
        [base | {"sample_index": i} | r for i, r in enumerate(rows)], schema=SCORED
    )


def good(score: float, steps: Any = None) -> ModelScore:
    return ModelScore("ok", score, "", steps)


def test_accuracy_is_measured_beside_models() -> None:
    assert rule_weights({"orm": 1.0}, {"orm": {}}) == {"accuracy": 0.0}
    assert rule_weights({"orm": 1.0, "accuracy": 0.5, "format": 0.1}, {"orm": {}}) == {
        "accuracy": 0.5,
        "format": 0.1,
    }
    assert rule_weights({"format": 0.1}, {}) == {"format": 0.1}


def test_weighted_sum_and_product() -> None:
    verdicts = [{"orm": good(0.5), "prm": good(0.25), "seen": good(9.0)}]
    weights = {"orm": 2.0, "prm": -1.0, "seen": 0.0}
    row = check_scored(join(rules({}), verdicts, weights, "sum")).to_pylist()[0]
    assert row["reward"] == 1.0 + 1.0 - 0.25
    assert dict(row["parts"]) == {"accuracy": 1.0, "orm": 0.5, "prm": 0.25, "seen": 9.0}
    assert (
        join(rules({}), verdicts, weights, "product").to_pylist()[0]["reward"] == 1.0 * 1.0 * -0.25
    )


@pytest.mark.parametrize(
    "rule, model, weight, status",
    [
        ("ok", "ungradable", 1.0, "ungradable"),
        ("ok", "error", 1.0, "error"),
        ("timeout", "ok", 1.0, "timeout"),
        ("ungradable", "error", 1.0, "error"),
        ("timeout", "ungradable", 1.0, "timeout"),
        ("ok", "error", 0.0, "ok"),
    ],
)
def test_the_worst_verdict_counts_and_is_never_a_number(
    rule: str, model: str, weight: float, status: str
) -> None:
    reward = 1.0 if rule == "ok" else None
    verdict = good(0.5) if model == "ok" else ModelScore(model, None, "broken")
    batch = check_scored(
        join(
            rules({}, {"status": rule, "reward": reward}),
            [{"orm": good(0.25)}, {"orm": verdict}],
            {"orm": weight},
            "sum",
        )
    )
    first, second = batch.to_pylist()
    assert (first["status"], first["reward"]) == ("ok", 1.0 + 0.25 * weight)
    assert (second["status"], second["reward"]) == (status, 1.0 if status == "ok" else None)
    assert ("orm: broken" in second["reason"]) == (model != "ok" and weight > 0)
    assert ("orm" in dict(second["parts"])) == (model == "ok")


def test_a_process_model_rewards_the_steps_and_the_rest_is_paid_at_the_end() -> None:
    verdicts = [
        {"prm": good(0.25, ([0.75, 0.25], [4, 9])), "orm": good(0.5)},
        {"prm": ModelScore("error", None, "nan"), "orm": good(0.5)},
    ]
    batch = check_scored(join(rules({}, {}), verdicts, {"prm": 2.0, "orm": 1.0}, "sum", "prm"))
    first, second = batch.to_pylist()
    assert first["reward"] == 1.0 + 0.5 + 0.5
    assert (first["step_rewards"], first["step_ends"]) == ([1.5, 0.5 + 1.5], [4, 9])
    assert second["step_rewards"] is None and second["status"] == "error"
