"""What a run is, apart from its tensors and handles: the part of a checkpoint that the driver
holds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.data.prompt import Prompt
from actors.staleness import Ledger

FILE = "trainer.json"  # in a checkpoint's folder


@dataclass
class State:
    """Plain data that the rest of a run depends on. It serialises itself (`to_json`, `from_json`).

    A stage changes it in place, step by step; a resumed run, and one that goes back to its last
    checkpoint, begins from a new State. A field that a stage has no use for keeps its default.
    """

    done: int = 0  # steps
    version: int = 0  # of the policy; 0 is the model that the run began with
    optimizer_steps: int = 0
    before: dict[str, Any] = field(default_factory=dict)  # measured before the first step
    metrics: dict[str, float] = field(default_factory=dict)  # written for the last step, by name
    wandb_id: str | None = None
    # Reinforcement learning.
    ledger: Ledger = field(default_factory=Ledger)
    waiting: dict[int, Prompt] = field(default_factory=dict)  # admitted groups, not yet trained on
    sampler: dict[str, Any] = field(default_factory=dict)  # Sampler.state(): the place in the data
    evaluations: int = 0  # prompts sampled outside training; numbers the ids of such groups
    evaluated: int = 0  # the last step with an evaluation
    tokens: int = 0  # generated in training
    generating_s: float = 0.0  # seconds spent waiting for generators
    worst_mismatch: float = 0.0  # largest |learner - generator| log-probability seen, in nats
    reference_reset_at: int = 0  # step whose policy is the reference; 0: the initial model
    warned: dict[str, Any] = field(default_factory=dict)  # state of the guards
    # Iterative training of a reward model (learner/stages/rl/iterative.py).
    refreshes: int = 0
    refreshed_at: int = -1  # the step after which the last refresh came; -1: none yet

    def to_json(self) -> dict[str, Any]:
        """Everything, as values that `json.dumps` accepts.

        A metric that is not finite is left out.
        """
        plain = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("ledger", "waiting", "metrics")
        }
        return plain | {
            "metrics": {name: v for name, v in self.metrics.items() if math.isfinite(v)},
            "ledger": {
                "admitted": self.ledger.admitted,
                "trained": self.ledger.trained,
                "filtered": dict(self.ledger.filtered),
            },
            "waiting": [[i, dataclasses.asdict(p)] for i, p in sorted(self.waiting.items())],
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> State:
        """The inverse of `to_json`; other keys, such as the settings of the run, are passed over.

        Groups that were waiting count as in flight, because they are generated again. Raises
        ConservationError where the ledger does not balance.
        """
        values = {f.name: saved[f.name] for f in dataclasses.fields(cls) if f.name in saved}
        if "waiting" in values:
            values["waiting"] = {int(i): Prompt(**p) for i, p in saved["waiting"]}
        if "ledger" in values:
            counts = saved["ledger"]
            values["ledger"] = Ledger(
                counts["admitted"],
                counts["trained"],
                Counter(counts["filtered"]),
                in_flight=set(values.get("waiting", ())),
            )
            values["ledger"].check()
        return cls(**values)

    def snapshot(self) -> dict[str, Any]:
        """`to_json` as a copy that shares nothing with this State."""
        return json.loads(json.dumps(self.to_json()))

    @classmethod
    def read(cls, checkpoint: Path) -> State:
        """The State in a checkpoint's folder."""
        return cls.from_json(json.loads((checkpoint / FILE).read_text()))
