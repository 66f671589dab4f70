"""Pre-training of the embedded base model, on the learner's own path: packed corpus -> rollout record -> update.

Every token but a sequence's first is trained on, all with equal weight; deterministic given the seed and the threads.
"""

from __future__ import annotations

import time
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


def as_rollout(ids: np.ndarray) -> pa.RecordBatch:
    """ROLLOUT of packed sequences int32 [S, L]: the first token is the prompt, the rest what is learned."""
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
    """An UpdateJob that trains on every row of one table with advantage 1 (maximum likelihood)."""
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


def pretrain(cfg: Config, run_dir: Path) -> None:
    """Train for cfg.steps and write run_dir/model."""
    from cluster.monitoring.metrics import MetricLog

    tokenizer = load_tokenizer(cfg.model)
    learner = LearnerGroup(cfg)
    parameters = learner.start()["parameters"]
    print(f"volley: {parameters:,.0f} parameters", flush=True)
    shape = (int(cfg.data.options["sequences"]), int(cfg.data.options["length"]))
    batches = packed_batches(tokenizer, cfg.seed, *shape)
    log = MetricLog(
        run_dir,
        wandb=cfg.logging.wandb,
        wandb_project=cfg.logging.wandb_project,
        run_meta={"experiment": cfg.experiment, "seed": cfg.seed},
    )
    lengths = np.full(shape[0], shape[1])
    started = time.monotonic()
    for step in range(cfg.steps):
        table = ray.put(as_rollout(next(batches)))
        result = learner.update(whole_batch_job(cfg, table, lengths, lengths - 1, step))
        if step % 20 == 19 or step == cfg.steps - 1:
            stats, outcome = result["stats"], result["steps"][0]
            seconds = time.monotonic() - started
            log.log(
                step + 1,
                {
                    "pretrain/loss": stats["loss"].sum,
                    "actor/grad_norm": outcome["grad_norm"],
                    "actor/lr": outcome["learning_rate"],
                },
            )
            print(
                f"volley: step {step + 1}/{cfg.steps} loss {stats['loss'].sum:.4f} "
                f"{(step + 1) * shape[0] * shape[1] / seconds:,.0f} tokens/s",
                flush=True,
            )
    learner.save_model(str(run_dir / "model"), tokenizer)
    log.close()
    print(f"volley: wrote {run_dir / 'model'}", flush=True)
