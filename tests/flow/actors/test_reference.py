"""The reference pool's log-probs are those of the model it was given, and stay frozen until told
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from actors.records import REFERENCE, ROLLOUT
from actors.reference import ReferencePool
from tests.flow.engines import hf_logprobs, perturbed, publish


def rollouts(seed: int, sizes: list[int]) -> pa.RecordBatch:
    """A ROLLOUT of random tokens: one row for each completion length in `sizes`."""
    rng = np.random.default_rng(seed)
    n = len(sizes)
    return pa.RecordBatch.from_pydict(
        {
            "group_id": [seed] * n,
            "prompt_id": [f"p{seed}"] * n,
            "sample_index": list(range(n)),
            "prompt_ids": [rng.integers(7, 100, 6 + seed).tolist()] * n,
            "completion_ids": [rng.integers(7, 100, k).tolist() for k in sizes],
            "behaviour_logprobs": [(-rng.random(k) * 4).tolist() for k in sizes],
            "versions": [[0] * k for k in sizes],
            "finish_reason": ["length"] * n,
        },
        schema=ROLLOUT,
    )


@pytest.fixture(scope="module")
def settings(model_path: Path) -> Any:
    from learner.main import load

    return load(
        [
            "experiment=r1_zero",
            f"model={model_path}",
            "reference.count=2",
            "learner.micro_batch_tokens=150",
            "learner.logprob_chunk_tokens=32",
            "reference.cpus=0",
        ]
    )


@pytest.fixture(scope="module")
def pool(
    cluster: None, settings: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReferencePool]:
    pool = ReferencePool(settings, tmp_path_factory.mktemp("run"))
    pool.start()
    yield pool
    for member in pool.members:
        member.end()


def worst(pool: ReferencePool, tables: list[pa.RecordBatch], model: Any) -> float:
    found = ray.get(pool.logprobs([ray.put(t) for t in tables]), timeout=60)
    assert len(found) == len(tables)
    difference = 0.0
    for table, batch in zip(tables, found, strict=True):
        assert batch.schema.equals(REFERENCE)
        assert batch.column("group_id").equals(table.column("group_id"))
        for row, values in zip(
            table.to_pylist(), batch.column("ref_logprobs").to_pylist(), strict=True
        ):
            wanted = hf_logprobs(model, row["prompt_ids"] + row["completion_ids"])[
                len(row["prompt_ids"]) - 1 :
            ]
            difference = max(difference, float(np.abs(wanted - np.array(values)).max()))
    return difference


# Unequal lengths, more groups than actors and fewer, and a single one.
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_logprobs_are_those_of_hugging_face(pool: ReferencePool, model: Any, groups: int) -> None:
    tables = [rollouts(g, [3 + g, 30, 1, 17]) for g in range(groups)]
    difference = worst(pool, tables, model)
    print(f"largest |reference - Hugging Face| log-prob: {difference:.2g}")
    assert difference < 1e-5


def test_reset_to_published_weights(pool: ReferencePool, model: Any) -> None:
    tables = [rollouts(g, [9, 20]) for g in range(3)]
    newer = perturbed(model, 5)
    assert worst(pool, tables, newer) > 0.05
    pool.load(publish(newer))
    try:
        assert worst(pool, tables, newer) < 1e-5
    finally:
        pool.load(publish(model))
    assert worst(pool, tables, model) < 1e-5
