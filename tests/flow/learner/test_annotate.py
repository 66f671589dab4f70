"""Step annotation as a user starts it, every engine real: labels that agree with the task's own
check of the steps, and the same parts from a run that was killed and from the one that went on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.modeling.tokenizer import build_tokenizer
from cluster.stopping import RunError
from learner.checkpoints.checkpoint import CheckpointError
from learner.main import load
from learner.stages.annotate import FOLDER, begin, name
from reward_service.models.labelled import read
from reward_service.step_labels.steps import sum_steps
from tests.flow.runs import RUN_S, Run, Starter

PROMPTS, ANSWERS, COMPLETIONS, PARTS = 40, 4, 4, 3
SMALL = [
    "+experiment=annotate_steps",
    f"annotate.prompts={PROMPTS}",
    f"annotate.answers={ANSWERS}",
    f"annotate.completions={COMPLETIONS}",
    "data.heldout_size=6",
    "generator.threads=1",
    "learner.threads=1",
    "cluster=local",
    "cluster.dashboard=false",
]

pytestmark = pytest.mark.timeout(2 * RUN_S + 60)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("annotate"), "tiny", SMALL)
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def killed(start: Starter) -> tuple[pa.Table, int]:
    """The second part of a run that was killed after it, and when the first was written. The second
    is cut off afterwards, as by a disk.
    """
    run = start("run")
    first, second = (run.folder / FOLDER / name(k) for k in range(2))
    run.until(second.is_file, "second part")
    run.kill()
    run.wait()
    assert not (run.folder / "annotations.parquet").exists()
    table = pq.read_table(second)
    second.write_bytes(second.read_bytes()[:-100])
    return table, first.stat().st_mtime_ns


@pytest.fixture(scope="module")
def done(killed: tuple[pa.Table, int], start: Starter) -> Run:
    """The run that went on, to its end."""
    run = start("run", "resume=auto")
    assert run.wait() == 0, run.output
    return run


def test_every_answer_has_a_label_a_step(done: Run) -> None:
    rows = pq.read_table(done.folder / "annotations.parquet").to_pylist()
    assert len(rows) == PROMPTS * ANSWERS and len({r["prompt_id"] for r in rows}) == PROMPTS
    tokenizer, inner = build_tokenizer(), 0
    for r in rows:
        assert r["prompt_ids"] == tokenizer(f"User: {r['question']}\nAssistant: ")["input_ids"]
        assert r["completion"] == tokenizer.decode(r["completion_ids"], skip_special_tokens=True)
        checked = sum_steps(r["question"], r["completion"])
        assert [
            len(tokenizer.decode(r["completion_ids"][: end + 1])) for end in r["ends"][:-1]
        ] == [end for end, _ in checked]
        assert r["ends"][-1] == len(r["completion_ids"]) - 1
        assert r["exact"] == [float(right) for _, right in checked] + [r["accuracy"]]
        assert r["soft"][-1] == r["hard"][-1] == r["accuracy"]
        assert {v * COMPLETIONS % 1 for v in r["soft"]} == {0.0} and r["hard"] == [
            float(v > 0) for v in r["soft"]
        ]
        inner += len(r["ends"]) - 1
    assert inner > PROMPTS, "the policy hardly ever works in steps, so nothing below is proved"
    labelled, dropped = read(
        done.folder / "annotations.parquet", tokenizer
    )  # as a process model reads it
    assert labelled.num_rows == len(rows) and dropped == 0


def test_summary(done: Run) -> None:
    rows = pq.read_table(done.folder / "annotations.parquet").to_pylist()
    s = done.summary()
    steps = sum(len(r["ends"]) for r in rows)
    assert (s["prompts"], s["answers"], s["dropped"], s["steps"]) == (PROMPTS, len(rows), 0, steps)
    distinct = {
        (r["prompt_id"], *r["completion_ids"][: end + 1]) for r in rows for end in r["ends"][:-1]
    }
    assert s["completions"] == COMPLETIONS * len(distinct) < COMPLETIONS * (steps - len(rows))
    pairs = np.array(
        [(r["soft"][i], r["exact"][i]) for r in rows for i in range(len(r["ends"]) - 1)]
    )
    assert s["checked_steps"] == len(pairs) and s["checked_steps_all"] == steps
    assert (
        s["soft_correlation"] == pytest.approx(np.corrcoef(pairs.T)[0, 1])
        and s["soft_correlation"] > 0.6
    )
    assert s["cached_share"] > 0.3, "prefixes of one prompt share no block of the cache"
    assert f"part {PARTS}/{PARTS}" in done.output


def test_what_is_made_again_is_the_same(killed: tuple[pa.Table, int], done: Run) -> None:
    parts = [done.folder / FOLDER / name(k) for k in range(PARTS)]
    table, written = killed
    assert pq.read_table(parts[1]).equals(table)
    assert parts[0].stat().st_mtime_ns == written and "part 1/" not in done.output
    whole = pa.concat_tables([pq.read_table(p).replace_schema_metadata() for p in parts])
    assert pq.read_table(done.folder / "annotations.parquet").equals(whole)


def test_parts_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    begin(load(SMALL), tmp_path / FOLDER)
    with pytest.raises(RunError, match="resume=auto"):
        begin(load(SMALL), tmp_path / FOLDER)
    auto = [*SMALL, f"run_dir={tmp_path}", "resume=auto"]
    begin(load(auto), tmp_path / FOLDER)
    with pytest.raises(CheckpointError, match="annotate.completions"):
        begin(load([*auto, "annotate.completions=5"]), tmp_path / FOLDER)
