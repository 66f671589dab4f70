"""The stage that pre-trains the embedded base model, on the learner's own path.

    packed corpus -> ROLLOUT table -> update

Every token of a sequence but its first is trained on, all with equal weight. The result depends on
the seed and the number of threads alone. The corpus is packed by a Ray actor, so that no tokens
pass through the driver.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.data.corpus import packed_batches
from actors.modeling.loading import load_tokenizer
from actors.records import ROLLOUT
from conf.schema import Config
from learner.algorithms.assemble import make_plan
from learner.algorithms.batching import place
from learner.algorithms.losses import sample_weights
from learner.algorithms.schedule import learning_rate
from learner.engine.group import LearnerGroup
from learner.engine.job import UpdateJob
from learner.launch import Launch
from learner.stage import Run, Stage, open_log, plain_progress
from learner.state import State

LINE_EVERY = 20  # steps between two lines of output and of metrics


@dataclass(frozen=True)
class PretrainRun(Run):
    """The handles of this stage, on top of those of every stage."""

    tokenizer: Any
    corpus: Any  # handle of a CorpusReader
    sequences: int  # a step
    length: int  # tokens of a sequence


class CorpusReader:
    """Ray actor that packs the corpus: the table of each step, which stays in the object store."""

    def __init__(self, tokenizer: Any, seed: int, sequences: int, length: int) -> None:
        self.settings = (tokenizer, seed, sequences, length)
        self.begin()

    def begin(self) -> None:
        self.batches, self.next_number = packed_batches(*self.settings), 1

    def table(self, number: int) -> pa.RecordBatch:
        """The ROLLOUT table of step `number`, counted from 1, whatever was asked before."""
        if number < self.next_number:
            self.begin()
        while True:
            ids, found = next(self.batches), self.next_number
            self.next_number += 1
            if found == number:
                return as_rollout(ids)


def as_rollout(ids: np.ndarray) -> pa.RecordBatch:
    """ROLLOUT of packed sequences int32 [S, L]: the first token is the prompt, the rest what is
    learned.
    """
    n, length = ids.shape
    offsets = pa.array(np.arange(n + 1) * (length - 1), pa.int32())

    def lists(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))

    rest = ids[:, 1:]
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.arange(n), pa.int64()),
            pa.array(["corpus"] * n),
            pa.array(np.zeros(n), pa.int32()),
            pa.array(ids[:, :1].tolist(), pa.list_(pa.int32())),
            lists(np.ascontiguousarray(rest)),
            lists(np.zeros(rest.shape, np.float32)),
            lists(np.full(rest.shape, -1, np.int32)),
            pa.array(["length"] * n),
        ],
        schema=ROLLOUT,
    )


def whole_batch_job(
    cfg: Config, table: Any, lengths: np.ndarray, completion: np.ndarray, step: int
) -> UpdateJob:
    """An UpdateJob that trains on every row of one table with advantage 1 (maximum likelihood).

    `lengths`, `completion`: int [rows], tokens of a sequence, and how many of them are learned;
    `step` counts from 0.
    """
    n = len(lengths)
    where = place(lengths, np.arange(n), 1, cfg.learner.ranks, cfg.learner.micro_batch_tokens)
    weights = sample_weights(
        cfg.algorithm.normaliser, completion, np.ones(n, bool), cfg.algorithm.loss_constant
    )
    ones = np.ones(n)
    plan = make_plan(
        np.zeros(n), np.arange(n), np.arange(n), ones, ones.astype(bool), ones, weights, where
    )
    rate = learning_rate(cfg.optimizer, step, cfg.steps)
    return UpdateJob(0, [table], None, plan, where.micro_batches, (rate,), 1.0)


def build(launch: Launch, state: State, stack: ExitStack) -> PretrainRun:
    """Create the learner's ranks and the reader of the corpus."""
    cfg = launch.cfg
    tokenizer = load_tokenizer(cfg.model)
    sequences, length = (int(cfg.data.options[key]) for key in ("sequences", "length"))
    reader = ray.remote(CorpusReader).options(name="corpus", num_cpus=0, max_restarts=-1)
    return PretrainRun(
        launch=launch,
        cfg=cfg,
        log=open_log(launch, state, cfg.steps, stack),
        progress=plain_progress(cfg, cfg.steps),
        learner=LearnerGroup(cfg),
        tokenizer=tokenizer,
        corpus=reader.remote(tokenizer, cfg.seed, sequences, length),
        sequences=sequences,
        length=length,
    )


def ready(run: PretrainRun, state: State, saved: Path | None) -> None:
    """Wait for the ranks, which load the checkpoint in `saved` if there is one."""
    parameters = run.learner.start(str(saved) if saved else None)["parameters"]
    print(f"volley: {parameters:,.0f} parameters", flush=True)


def rewind(run: PretrainRun, state: State, saved: Path | None) -> None:
    """Nothing to do: the reader of the corpus gives any step's table again."""


def step(run: PretrainRun, state: State, number: int) -> None:
    """One optimizer step."""
    began = time.monotonic()
    lengths = np.full(run.sequences, run.length)
    table = run.corpus.table.remote(number)
    job = whole_batch_job(run.cfg, table, lengths, lengths - 1, number - 1)
    result = run.learner.update(job)
    if number % LINE_EVERY and number != run.cfg.steps:
        return
    stats, outcome = result["stats"], result["steps"][0]
    loss = stats["loss"].sum
    values = {
        "pretrain/loss": loss,
        "actor/grad_norm": outcome["grad_norm"],
        "actor/lr": outcome["learning_rate"],
    }
    state.metrics = run.log.log(number, values)
    rate = run.sequences * run.length / (time.monotonic() - began)
    steps = run.cfg.steps
    print(f"volley: step {number}/{steps} loss {loss:.4f} {rate:,.0f} tokens/s", flush=True)


def save(run: PretrainRun, state: State, folder: Path) -> None:
    """Write the tensors of a checkpoint."""
    run.learner.save_state(str(folder))


def finish(run: PretrainRun, state: State) -> dict[str, Any]:
    """Write the model to RUN_DIR/model."""
    run.learner.save_model(str(run.launch.run_dir / "model"), run.tokenizer)
    return {}


def conclude(run: PretrainRun, state: State, after: dict[str, Any], setup_s: float) -> None:
    """Say where the model is."""
    run.log.close()
    print(f"volley: wrote {run.launch.run_dir / 'model'}", flush=True)


STAGE = Stage(
    name="pretrain",
    inputs={"model": "model.path", "corpus": "data.kind"},
    outputs={"model": "model"},
    build=build,
    ready=ready,
    rewind=rewind,
    steps=lambda run: run.cfg.steps,
    step=step,
    save=save,
    finish=finish,
    conclude=conclude,
)
