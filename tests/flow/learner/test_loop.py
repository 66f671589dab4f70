"""The whole program as a user starts it: `python -m learner.main`, with every engine real and
everything small.

One quiet run is the measure of the others: two generators, or one that is killed in the middle,
must end bit for bit where it ended.
"""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.flow.runs import (
    PROMPTS,
    QUIET,
    ROOT,
    RUN_S,
    SIZE,
    STEPS,
    Run,
    Starter,
    generator_process,
)

TABLE = {"pass@1", "pass@8", "pass@64", "maj@8", "format", "length"}

PAIR_S = 2 * RUN_S  # deadline of a run that shares the machine with another one
pytestmark = pytest.mark.timeout(PAIR_S + 60)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Any:
    embedded = ROOT / "actors" / "modeling" / "assets" / "tiny" / "config.json"
    starter = Starter(
        tmp_path_factory.mktemp("loop"), "tiny" if embedded.exists() else str(model_path)
    )
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def two_generators(start: Starter) -> Run:
    """A run that is under way. It starts beside the quiet one, because starting engines takes most
    of the time and hardly uses a second core."""
    return start("two", *QUIET, "generator.count=2")


@pytest.fixture(scope="module")
def quiet(start: Starter, two_generators: Run) -> Run:
    run = start("quiet", "logging.wandb=disabled")
    assert run.wait(PAIR_S) == 0, run.output
    return run


def same_rollouts(one: Run, two: Run) -> None:
    first, second = one.rollouts(), two.rollouts()
    assert len(first) == len(second) == STEPS
    for a, b in zip(first, second, strict=True):
        assert a.equals(b), next(n for n in a.column_names if not a.column(n).equals(b.column(n)))


def same_end(one: Run, two: Run) -> None:
    same_rollouts(one, two)
    assert one.weights() == two.weights()
    for key in ("before", "after", "tokens_generated", "groups"):
        assert one.summary()[key] == two.summary()[key]


# ---- a quiet run ---------------------------------------------------------------------------------


def test_summary(quiet: Run) -> None:
    s = quiet.summary()
    assert set(s) == {
        "experiment",
        "model",
        "seed",
        "steps",
        "wall_s",
        "setup_s",
        "before",
        "after",
        "tokens_generated",
        "tokens_per_s",
        "sync_logprob_max_abs_diff",
        "groups",
    }
    assert set(s["before"]) == set(s["after"]) == TABLE
    assert (s["experiment"], s["seed"], s["steps"]) == ("r1_zero", 0, STEPS)
    n = STEPS * PROMPTS
    assert s["groups"] == {"admitted": n, "trained": n, "filtered": 0, "in_flight": 0, "queued": 0}
    assert 0 < s["setup_s"] < s["wall_s"] and s["tokens_per_s"] > 0
    assert s["tokens_generated"] == sum(
        sum(t.column("length").to_pylist()) for t in quiet.rollouts()
    )
    assert 0 < s["sync_logprob_max_abs_diff"] < 1e-4
    for moment in ("before", "after"):
        table = s[moment]
        assert table["pass@64"] is None  # 8 samples cannot tell
        assert all(0 <= table[k] <= 1 for k in ("pass@1", "pass@8", "maj@8", "format"))
        assert table["pass@1"] <= table["pass@8"] and 1 <= table["length"] <= 72


def test_metrics_and_config(quiet: Run) -> None:
    norms, versions = quiet.metrics("actor/grad_norm"), quiet.metrics("training/policy_version")
    assert all(norms[s] > 0 for s in range(1, STEPS + 1)), (
        "nothing was trained, so nothing below is proved"
    )
    assert [versions[s] for s in range(1, STEPS + 1)] == [1, 2, 3]
    for name in ("training/rollout_logprob_diff/max", "sync/logprob_max_abs_diff"):
        found = quiet.metrics(name)
        assert len(found) == STEPS and all(0 <= v < 1e-4 for v in found.values())
    assert set(quiet.metrics("training/staleness/max").values()) == {0}
    assert set(quiet.metrics("eval/pass@1")) == {0, STEPS}
    assert all(math.isfinite(v) for v in quiet.metrics("actor/kl_loss").values())
    assert quiet.metrics("generator/restarts")[STEPS] == 0
    config = yaml.safe_load((quiet.folder / "config.yaml").read_text())
    assert config["rollout"]["group_size"] == SIZE and config["algorithm"]["name"] == "grpo"


def test_rollouts_are_decoded_and_complete(quiet: Run) -> None:
    for step, table in enumerate(quiet.rollouts(), 1):
        rows = table.to_pylist()
        assert len(rows) == PROMPTS * SIZE
        assert {r["step"] for r in rows} == {step} and {r["version"] for r in rows} == {step - 1}
        ids = [(r["group_id"], r["sample_index"]) for r in rows]
        assert ids == [
            (g, i) for g in range((step - 1) * PROMPTS, step * PROMPTS) for i in range(SIZE)
        ]
        for r in rows:
            assert r["status"] == "ok" and r["finish_reason"] in ("stop", "length")
            assert isinstance(r["completion"], str) and 1 <= r["length"] <= 72
            assert "<eos>" not in r["completion"] and "<pad>" not in r["prompt"]
        for g in {r["group_id"] for r in rows}:  # GRPO's advantage from the rewards in the file
            group = [r for r in rows if r["group_id"] == g]
            rewards = np.array([r["reward"] for r in group])
            wanted = (
                (rewards - rewards.mean()) / rewards.std() if rewards.std() > 1e-9 else 0 * rewards
            )
            np.testing.assert_allclose([r["advantage"] for r in group], wanted, atol=1e-9)


def test_the_saved_model_loads_and_moved(quiet: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = quiet.folder / "model"
    after = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    config = yaml.safe_load((quiet.folder / "config.yaml").read_text())
    before = AutoModelForCausalLM.from_pretrained(config["model"]["path"], use_safetensors=True)
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(after.parameters(), before.parameters(), strict=True)
    )
    assert 0 < moved < 0.1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<think>1+2=3</think>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "<think>1+2=3</think>"


def test_output_is_short_and_nothing_is_left(quiet: Run) -> None:
    text = quiet.output
    assert "Traceback" not in text and "rror" not in text, text
    assert len(text.splitlines()) < 60, text
    assert f"results in {quiet.folder}" in text
    assert (quiet.folder / "report.html").is_file()
    assert quiet.processes() == []


def test_a_folder_that_holds_a_run_is_refused(start: Starter, quiet: Run) -> None:
    before = (quiet.folder / "summary.json").read_bytes()
    again = start("again", f"run_dir={quiet.folder}")
    assert again.wait(60) == 1
    assert "holds a run already" in again.output and "Traceback" not in again.output
    assert (quiet.folder / "summary.json").read_bytes() == before


# ---- runs that must end where the quiet one did --------------------------------------------------


def test_two_generators_give_the_same_run(two_generators: Run, quiet: Run) -> None:
    assert two_generators.wait(PAIR_S) == 0, two_generators.output
    same_end(quiet, two_generators)


def test_a_generator_killed_in_a_step_changes_nothing(
    start: Starter, quiet: Run, off_policy: Run
) -> None:
    """Same settings and seed as the quiet run: this is the second of two identical runs too."""
    run = start("killed", *QUIET)
    victim = run.until(lambda: generator_process(run), "generator")
    run.until(lambda: 1 in run.metrics("reward/mean"), "first step")
    victim.send_signal(signal.SIGKILL)
    assert run.wait(PAIR_S) == 0, run.output
    assert run.metrics("generator/restarts")[STEPS] == 1
    same_end(quiet, run)
    assert "Traceback" not in run.output, run.output
    assert run.processes() == []


def test_a_driver_killed_and_resumed_ends_where_the_quiet_run_did(
    start: Starter, quiet: Run
) -> None:
    args = [*QUIET, "checkpoint.every=1", "resume=auto"]
    run = start("resumed", *args)  # resume=auto where there is nothing yet starts anew
    run.until(
        lambda: (run.folder / "checkpoints" / "step_00001" / "manifest.json").exists(),
        "first checkpoint",
    )
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(timeout=30)
    again = start("resumed", *args)
    assert again.wait() == 0, again.output
    assert "going on after step" in again.output
    same_end(quiet, again)
    versions = again.metrics("training/policy_version")
    assert [versions[s] for s in range(1, STEPS + 1)] == [1, 2, 3]


# ---- off-policy, several updates, filters, and a step that is not finite -------------------------

POISON = """
import dataclasses, sys
import numpy as np, pyarrow as pa
from cluster import security
security.secure_local_cluster()  # before Ray is imported, with the stages
from learner import main
from learner.stages.rl import loop

real, calls = loop.update, []

def poisoned(batch):
    i = batch.plan.schema.names.index("advantage")
    nan = pa.array(np.full(batch.plan.num_rows, np.nan))
    plan = batch.plan.set_column(i, batch.plan.schema.field(i), nan)
    return dataclasses.replace(batch, plan=plan)

def update(run, state, number, batch, plan):
    calls.append(1)
    if len(calls) == 2 and plan.plan is not None:
        plan = poisoned(plan)
    return real(run, state, number, batch, plan)

loop.update = update
raise SystemExit(main.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def off_policy(start: Starter) -> Run:
    """A run that is under way, with a second batch that is nan; it starts beside the killed one."""
    program = start.folder / "poisoned.py"
    program.write_text(POISON)
    return start(
        "off_policy",
        "rollout.max_staleness=1",
        "algorithm.tis_cap=2",
        "learner.updates_per_batch=2",
        "algorithm.filter=skip_dead",
        "algorithm.beta=0",
        "logging.wandb=offline",
        "logging.report=false",
        program=(str(program),),
    )


def test_off_policy_run_with_a_poisoned_step(off_policy: Run) -> None:
    """One version behind, two optimizer steps a batch, dead groups left out, no reference."""
    run = off_policy
    assert run.wait(PAIR_S) == 0, run.output
    groups = run.summary()["groups"]
    assert (
        groups["admitted"]
        == groups["trained"] + groups["filtered"] + groups["in_flight"] + groups["queued"]
    )
    assert groups["trained"] + groups["filtered"] == STEPS * PROMPTS and groups["trained"] > 0
    assert groups["admitted"] == (STEPS + 1) * PROMPTS  # one step ahead, and no more
    for step in range(1, STEPS + 1):
        books = {k: run.metrics(f"groups/{k}")[step] for k in groups}
        assert books["admitted"] == sum(v for k, v in books.items() if k != "admitted")
    staleness = run.metrics("training/staleness/max")
    assert staleness[1] == 0 and max(staleness.values()) == 1
    skipped, versions = run.metrics("actor/skipped_steps"), run.metrics("training/policy_version")
    assert skipped[1] == 0 and skipped[2] == 2 and skipped[3] == 0
    assert (
        versions[1] == 1 and versions[2] == 1 and versions[3] == 2
    )  # a skipped step publishes nothing
    assert run.metrics("actor/tis_weight/max")[1] <= 2
    assert run.metrics("actor/ratio/max")[1] > 1 + 1e-6  # the second optimizer step of the batch
    for table in run.rollouts():
        dead = [r for r in table.to_pylist() if r["advantage"] == 0]
        assert (
            all(math.isfinite(r["advantage"]) for r in table.to_pylist())
            and len(dead) < table.num_rows
        )
    assert list((run.folder / "wandb").glob("offline-run-*"))
    assert run.processes() == []
