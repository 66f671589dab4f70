"""The loop of all stages: when it saves, how it stops, and where it goes back to."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.stopping import RunError, Stopping
from cluster.supervision.failures import LearnerLost
from conf.schema import Config
from conf.settings import get
from learner.checkpoints import checkpoint
from learner.launch import Launch
from learner.stage import Run, Stage, run_stage
from learner.stages.rl.run import RLRun
from learner.stages.table import STAGES
from learner.state import State

ROOT = Path(__file__).resolve().parents[3]


class Learner:
    """Counts how often it was replaced; every replacement may be told of."""

    def __init__(self) -> None:
        self.revived: list[str | None] = []

    def revive(self, why: LearnerLost, saved: str | None) -> None:
        self.revived.append(saved and Path(saved).name)


class Log:
    def __init__(self) -> None:
        self.rewound: list[int] = []

    def rewind(self, step: int) -> None:
        self.rewound.append(step)


class View:
    """A progress view that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclasses.dataclass(frozen=True)
class Tried:
    """What a run of the loop did: the calls in their order, and its handles."""

    calls: list[Any]
    run: Run


def launch(folder: Path, steps: int, every: int, saved: Path | None = None) -> Launch:
    cfg = Config(steps=steps)
    cfg.checkpoint.every, cfg.checkpoint.keep = every, 0
    return Launch(cfg, folder, 0.0, Stopping(), checkpoint.open_store(cfg, folder), saved)


def try_stage(
    start: Launch,
    step: Callable[[Run, State, int], None] = lambda run, state, number: None,
    between: Callable[[Run, State], bool] = lambda run, state: False,
    outputs: dict[str, str] | None = None,
) -> Tried:
    """Run a stage whose functions note that they were called."""
    calls: list[Any] = []
    run = Run(start, start.cfg, Log(), View(), Learner())

    def noted_step(run: Run, state: State, number: int) -> None:
        calls.append(number)
        state.version = number
        step(run, state, number)

    def begin(run: Run, state: State) -> None:
        calls.append("begin")
        if not state.before:
            calls.append("measured")
            state.before = {"pass@1": 0.5}

    def save(run: Run, state: State, folder: Path) -> None:
        calls.append(f"save {state.done}")
        (folder / "policy.safetensors").write_bytes(b"x")

    def build(start: Launch, state: State, stack: ExitStack) -> Run:
        calls.append(f"build at {state.done}")
        return run

    stage = Stage(
        name="test",
        inputs={},
        outputs=outputs or {},
        build=build,
        ready=lambda run, state, saved: calls.append("ready"),
        rewind=lambda run, state, saved: calls.append(f"rewind to {state.done}, {state.version}"),
        steps=lambda run: run.cfg.steps,
        begin=begin,
        step=noted_step,
        between=between,
        save=save,
        finish=lambda run, state: {"done": state.done},
        conclude=lambda run, state, result, setup_s: calls.append(f"concluded {result}"),
    )
    tried = Tried(calls, run)
    try:
        run_stage(stage, start)
    except KeyboardInterrupt:
        calls.append("interrupted")
    return tried


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    tried = try_stage(launch(tmp_path, steps=5, every=2))
    assert tried.calls == [
        "build at 0", "ready", "begin", "measured", 1, 2, "save 2", 3, 4, "save 4", 5, "save 5",
        "concluded {'done': 5}",
    ]  # fmt: skip


def test_a_stage_may_ask_for_a_checkpoint(tmp_path: Path) -> None:
    asked = try_stage(launch(tmp_path, 3, 0), between=lambda run, state: state.done == 1)
    assert [c for c in asked.calls if str(c).startswith("save")] == ["save 1", "save 3"]


def test_sigterm_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    def step(run: Run, state: State, number: int) -> None:
        if number == 2:
            assert run.launch.stopping.gently
            run.launch.stopping.set()

    tried = try_stage(launch(tmp_path, 5, 0), step)
    assert tried.calls[-3:] == [2, "save 2", "interrupted"]


def test_a_resumed_stage_goes_on_after_the_last_step(tmp_path: Path) -> None:
    def stop(run: Run, state: State, number: int) -> None:
        if number == 2:
            run.launch.stopping.set()

    try_stage(launch(tmp_path, 4, 0), stop)
    saved = tmp_path / "checkpoints" / "step_00002"
    assert json.loads((saved / "trainer.json").read_text())["config"]["steps"] == 4
    resumed = try_stage(launch(tmp_path, 4, 0, saved))
    assert resumed.calls[:4] == ["build at 2", "ready", "begin", 3]


@pytest.mark.parametrize(("every", "back_to", "saved"), [(2, 2, "step_00002"), (0, 0, None)])
def test_a_lost_learner_goes_back_to_the_last_checkpoint_or_the_start(
    tmp_path: Path, every: int, back_to: int, saved: str | None
) -> None:
    lost: list[int] = []

    def step(run: Run, state: State, number: int) -> None:
        if number == 3 and not lost:
            lost.append(number)
            raise LearnerLost("a rank is gone")

    tried = try_stage(launch(tmp_path, 3, every), step)
    assert f"rewind to {back_to}, {back_to}" in tried.calls
    assert tried.run.learner.revived == [saved] and tried.run.log.rewound == [back_to]
    steps = [c for c in tried.calls if isinstance(c, int)]
    assert steps == [1, 2, 3, *range(back_to + 1, 4)]
    assert tried.calls.count("measured") == 1, "what was measured before the first step is lost"
    assert f"going on after step {back_to}" in tried.run.progress.notes


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    start = launch(tmp_path, 2, 1)
    monkeypatch.setattr(start.store, "commit", full)
    tried = try_stage(start)
    assert tried.calls[-1] == "concluded {'done': 2}"
    assert any("checkpoint of step 1: No space left" in n for n in tried.run.progress.notes)


def test_a_stage_that_leaves_no_output_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="stage test ended without its output model: .*/model"):
        try_stage(launch(tmp_path, 1, 0), outputs={"model": "model"})


def test_a_run_holds_at_most_12_handles_and_never_changes() -> None:
    for kind in (Run, RLRun):
        assert len(dataclasses.fields(kind)) <= 12
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_every_stage_has_a_settings_file_of_its_name_and_names_settings_as_inputs() -> None:
    for name, stage in STAGES.items():
        values = yaml.safe_load((ROOT / "conf" / "stage" / f"{name}.yaml").read_text())
        assert values["name"] == name == stage.name
        for setting in stage.inputs.values():
            get(Config(), setting)
    files = {p.stem for p in (ROOT / "conf" / "stage").glob("*.yaml")}
    assert files == set(STAGES)


def test_nobody_but_the_table_asks_for_the_name_of_a_stage() -> None:
    """What differs between stages is asked by what they do: answers, trains, evaluates."""
    askers = set()
    for top in ("conf", "cluster", "actors", "reward_service", "learner"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Compare | ast.Match | ast.Subscript):
                    continue
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and ast.unparse(inner).endswith(
                        "stage.name"
                    ):
                        askers.add(path.relative_to(ROOT).as_posix())
    assert askers == {"learner/stages/table.py"}
