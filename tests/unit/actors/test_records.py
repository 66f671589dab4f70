"""A malformed hand-off is refused by an error that names the record, the column and the row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from actors.records import (
    REFERENCE,
    ROLLOUT,
    SCORED,
    Bucket,
    Entry,
    Probe,
    Published,
    RecordError,
    check_reference,
    check_rollout,
    check_scored,
    checksum,
    conform,
    list_lengths,
    ragged,
)

GOOD_ROLLOUT: dict[str, list[Any]] = {
    "group_id": [7, 7],
    "prompt_id": ["p", "p"],
    "sample_index": [0, 1],
    "prompt_ids": [[5, 6], [5, 6]],
    "completion_ids": [[9, 1], [8, 8, 8]],
    "behaviour_logprobs": [[-0.5, -0.1], [-1.0, -2.0, 0.0]],
    "versions": [[3, 3], [3, 4, 4]],
    "finish_reason": ["stop", "length"],
}
GOOD_SCORED: dict[str, list[Any]] = {
    "group_id": [7, 7, 7, 7],
    "sample_index": [0, 1, 2, 3],
    "reward": [1.2, None, None, None],
    "parts": [[("accuracy", 1.0)], [], None, []],
    "accuracy": [1.0, None, None, None],
    "format": [1.0, None, None, None],
    "status": ["ok", "error", "timeout", "ungradable"],
    "extracted": ["12", "", None, ""],
    "reason": ["", "boom", "10 s", "no gold"],
    "step_rewards": [[1.0, 0.5], None, None, None],
    "step_ends": [[3, 7], None, None, None],
}


def rollout(**changes: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(GOOD_ROLLOUT | changes, schema=ROLLOUT)


def scored(**changes: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(GOOD_SCORED | changes, schema=SCORED)


def test_good_records_pass_unchanged() -> None:
    assert check_rollout(rollout()).equals(rollout())
    assert check_scored(scored()).equals(scored())


def test_a_reference_that_is_not_finite_is_refused_by_group_and_sample() -> None:
    values = [[-0.5, -0.1], [-1.0, -2.0]]
    good = {"group_id": [4, 4], "sample_index": [2, 3], "ref_logprobs": values}
    assert check_reference(pa.RecordBatch.from_pydict(good, schema=REFERENCE))
    for bad in (math.nan, math.inf, -math.inf):
        values[1][1] = bad
        with pytest.raises(RecordError, match=f"group 4, sample 3, token 1: ref_logprobs is {bad}"):
            check_reference(pa.RecordBatch.from_pydict(good, schema=REFERENCE))


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"behaviour_logprobs": [[-0.5], [-1.0, -2.0, 0.0]]},
            "row 0: 2 completion_ids but 1 behaviour_logprobs",
        ),
        ({"versions": [[3, 3], [3, 4]]}, "row 1: 3 completion_ids but 2 versions"),
        (
            {"behaviour_logprobs": [[-0.5, math.nan], [-1.0, -2.0, 0.0]]},
            "sample 0, token 1: behaviour_logprobs is nan",
        ),
        (
            {"behaviour_logprobs": [[-0.5, -math.inf], [-1.0, -2.0, 0.0]]},
            "sample 0, token 1: behaviour_logprobs is -inf",
        ),
        (
            {"behaviour_logprobs": [[-0.5, -0.1], [math.nan, -2.0, 0.0]]},
            "group 7, sample 1, token 0: ",
        ),
        (
            {"behaviour_logprobs": [[-0.5, -0.1], [-1.0, -2.0, math.nan]]},
            "group 7, sample 1, token 2: ",
        ),
        (
            {"behaviour_logprobs": [[-0.5, 0.7], [-1.0, -2.0, 0.0]]},
            "0.699999988079071, which is not a log-prob",
        ),
        ({"finish_reason": ["stop", "abort"]}, "finish_reason ['abort'] unknown"),
        ({"completion_ids": [None, [8, 8, 8]]}, "column completion_ids, row 0: null"),
        ({"prompt_id": ["p", None]}, "column prompt_id, row 1: null"),
    ],
)
def test_bad_rollouts_are_refused(changes: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(RecordError) as caught:
        check_rollout(rollout(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"status": ["ok", "error", "timeout", "fine"]}, "row 3: status 'fine'"),
        ({"reward": [None] * 4}, "row 0: status 'ok' with reward None"),
        ({"reward": [math.nan, None, None, None]}, "row 0: status 'ok' with reward nan"),
        ({"reward": [math.inf, None, None, None]}, "row 0: status 'ok' with reward inf"),
        (
            {"reward": [1.0, 0.0, None, None]},
            "row 1: status 'error' with reward 0.0",
        ),  # a silent zero
        ({"reward": [1.0, None, 0.0, None]}, "row 2: status 'timeout' with reward 0.0"),
        ({"step_ends": [[3], None, None, None]}, "row 0: step rewards [1.0, 0.5] with ends [3]"),
        (
            {"step_rewards": [[1.0, math.nan], None, None, None]},
            "row 0: step rewards [1.0, nan] with ends [3, 7]",
        ),
    ],
)
def test_bad_scores_are_refused(changes: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(RecordError) as caught:
        check_scored(scored(**changes))
    assert words in str(caught.value)


def test_schema_errors_name_the_columns() -> None:
    batch = rollout()
    wrong = pa.RecordBatch.from_arrays(
        [
            pa.array([0, 1], pa.int64()) if f.name == "sample_index" else batch.column(f.name)
            for f in ROLLOUT
            if f.name != "versions"
        ]
        + [pa.array([1, 2])],
        names=[f.name for f in ROLLOUT if f.name != "versions"] + ["stray"],
    )
    with pytest.raises(RecordError) as caught:
        conform(wrong, ROLLOUT, "rollout")
    text = str(caught.value)
    assert "missing columns ['versions']" in text and "unexpected columns ['stray']" in text
    assert "sample_index is int64, expected int32" in text


def test_ragged_views_respect_slices_and_empty_lists() -> None:
    column = pa.array([[1, 2], [], [3], [4, 5, 6]], pa.list_(pa.int32()))
    assert [r.tolist() for r in ragged(column)] == [[1, 2], [], [3], [4, 5, 6]]
    assert [r.tolist() for r in ragged(column.slice(1, 3))] == [[], [3], [4, 5, 6]]
    assert list_lengths(column.slice(1)).tolist() == [0, 1, 3]
    assert ragged(column.slice(0, 0)) == []


def test_checksum_tells_any_flipped_byte_and_any_swap() -> None:
    rng = np.random.default_rng(0)
    buffer = rng.integers(0, 256, 1000, np.uint8)
    whole = checksum(buffer)
    assert whole == checksum(buffer.copy())
    for place in (0, 499, 999):
        damaged = buffer.copy()
        damaged[place] ^= 1
        assert checksum(damaged) != whole
    assert checksum(buffer[::-1].copy()) != whole


def published(*buckets: list[Entry]) -> Published:
    return Published(3, [Bucket(None, b, "") for b in buckets], Probe([], [], 0.0))


def test_bytes_of_a_published_version_count_every_bucket_to_its_end() -> None:
    matrix = Entry("embedding", "float32", (10, 4), 0)  # alone in its bucket: 160 bytes
    pair = [Entry("w", "bfloat16", (3, 5), 0), Entry("b", "bfloat16", (5,), 32)]  # ends at 42
    assert published([matrix]).nbytes == 160
    assert published(pair, [matrix]).nbytes == 202
    assert published([Entry("scale", "float32", (), 4)]).nbytes == 8  # a scalar has one element
    assert published().nbytes == 0


def test_a_dtype_of_unknown_size_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="bucket entry w: dtype 'float5', expected one of"):
        assert published([Entry("w", "float5", (1,), 0)]).nbytes
