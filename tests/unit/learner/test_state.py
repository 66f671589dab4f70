"""The state of a run as plain data: what it serialises, and that it comes back the same."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import pytest

from actors.data.prompt import Prompt
from actors.staleness import ConservationError, Ledger
from learner.state import State


def prompt(number: int) -> Prompt:
    return Prompt(f"p{number}", f"{number}+1=?", str(number + 1), "text", "", "arithmetic", "math")


def used() -> State:
    """Groups 0 to 2 trained, 3 left out, 4 in flight, 5 queued; no field has its default."""
    return State(
        done=3,
        version=4,
        optimizer_steps=6,
        before={"pass@1": 0.25, "maj@8": None},
        metrics={"reward/mean": 0.5, "actor/kl_loss": math.nan},
        wandb_id="abc",
        ledger=Ledger(6, 3, Counter({"dead": 1}), in_flight={4}, queued={5}),
        waiting={5: prompt(5), 4: prompt(4)},
        sampler={"stream": {"cursor": 6}},
        evaluations=64,
        evaluated=2,
        tokens=1000,
        generating_s=1.5,
        worst_mismatch=1e-6,
        reference_reset_at=2,
        warned={"active": ["skipped_steps"]},
        refreshes=1,
        refreshed_at=2,
    )


def test_every_field_comes_back_from_json() -> None:
    state = used()
    copy = State.from_json(json.loads(json.dumps(state.to_json())))
    for field in dataclasses.fields(State):
        if field.name not in ("ledger", "metrics"):
            assert getattr(copy, field.name) == getattr(state, field.name), field.name
            assert getattr(copy, field.name) != getattr(State(), field.name), field.name
    assert copy.metrics == {"reward/mean": 0.5}  # what is not finite is no JSON
    # What was waiting is generated again, so that all of it is in flight.
    assert copy.ledger == Ledger(6, 3, Counter({"dead": 1}), in_flight={4, 5})


def test_other_keys_of_a_checkpoint_are_passed_over() -> None:
    assert State.from_json(used().to_json() | {"config": {"seed": 1}}).done == 3


def test_a_ledger_that_does_not_balance_is_refused() -> None:
    saved = used().to_json()
    saved["waiting"] = saved["waiting"][:1]
    with pytest.raises(ConservationError, match="not conserved"):
        State.from_json(saved)


def test_a_snapshot_does_not_change_with_the_state() -> None:
    state = used()
    snapshot = state.snapshot()
    state.sampler["stream"]["cursor"] = 7
    state.waiting.clear()
    assert snapshot["sampler"]["stream"]["cursor"] == 6 and len(snapshot["waiting"]) == 2
