"""The records that parts hand to each other: one Arrow schema a hand-off, checked at each hand-off.

prompts -> ROLLOUT -> SCORED -> PLAN (scalars of the controller) -> the learner. Token columns stay in the object
store with the actor that made them; the controller holds references and per-sample scalars (DESIGN invariant 8).

One row of ROLLOUT is one completion:

    group_id  prompt_id  sample_index  prompt_ids    completion_ids  behaviour_logprobs  versions   finish_reason
    17        "a3f1"     0             [5, 18, 40]   [3, 21, 2]      [-0.1, -1.2, -0.0]  [4, 4, 5]  "stop"

`versions[t]` is the version of the policy that produced token t; `finish_reason` is vLLM's own word ("stop",
"length"). Masks come from these lengths and words, never from searching for an id (DESIGN invariant 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from cluster.monitoring.vocabulary import STATUSES

FINISH_REASONS = ("stop", "length")
# Bytes of one element, by the name of a torch dtype (this module does not import torch).
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

PROMPT = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    ]
)
ROLLOUT = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)
SCORED = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),  # null unless status is "ok"
        pa.field("parts", pa.map_(pa.string(), pa.float64())),
        pa.field("accuracy", pa.float64()),
        pa.field("format", pa.float64()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("extracted", pa.string()),
        pa.field("reason", pa.string()),
        pa.field(
            "step_rewards", pa.list_(pa.float64())
        ),  # null unless steps are rewarded and status is "ok"
        pa.field("step_ends", pa.list_(pa.int32())),  # index of the last token of each step
    ]
)
REFERENCE = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("ref_logprobs", pa.list_(pa.float32()), nullable=False),
    ]
)
# What the controller tells the learner of each sample: where its tokens lie and how much they count.
PLAN = pa.schema(
    [
        pa.field(
            "table", pa.int32(), nullable=False
        ),  # index into the list of rollout tables handed along
        pa.field("row", pa.int32(), nullable=False),  # row in that table
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),  # 0 where not valid
        pa.field(
            "valid", pa.bool_(), nullable=False
        ),  # the reward's status is ok and nothing masks the sample
        pa.field(
            "advantage", pa.float64(), nullable=False
        ),  # nan where the learner works it out from its log-probs
        pa.field(
            "weight", pa.float64(), nullable=False
        ),  # of each completion token, over the whole optimizer step
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("micro_batch", pa.int32(), nullable=False),
        pa.field("update", pa.int32(), nullable=False),  # which optimizer step of this batch
        pa.field("step_rewards", pa.list_(pa.float64())),  # process supervision; null without
        pa.field("step_ends", pa.list_(pa.int32())),
    ]
)
# Answers with what is known of them: what a reward model is trained on and measured by. One row an answer.
LABELLED = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field(
            "ends", pa.list_(pa.int32()), nullable=False
        ),  # index of the last token of each step; outcome: of all
        pa.field("labels", pa.list_(pa.float64()), nullable=False),  # in [0, 1], one an end
        pa.field(
            "pair", pa.int64(), nullable=False
        ),  # the same for two rows, chosen first; -1: in no pair
        pa.field(
            "iteration", pa.int32(), nullable=False
        ),  # of iterative RL, in which it was sampled; 0 before
    ]
)


class RecordError(ValueError):
    """A hand-off does not hold what its schema promises; the message names the record, column and row."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. `temperature` > 0; `max_tokens` bounds one completion, in tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class GroupMeta:
    """Per-sample scalars of one finished group: all that the controller sees of it. Arrays have length n."""

    group_id: int
    prompt_id: str
    prompt_tokens: int
    lengths: np.ndarray  # int64, completion tokens
    finish_reasons: tuple[str, ...]
    version_min: int
    version_max: int
    generator: str = ""
    cached_tokens: int = (
        0  # of all samples' prompts: those whose keys and values were in the prefix cache
    )


@dataclass(frozen=True)
class GroupRequest:
    """A prompt and the seeds of its completions: `seeds[i]` alone decides what sample i draws."""

    group_id: int
    prompt_id: str
    prompt_ids: list[int]
    seeds: list[int]
    sampling: SamplingParams
    epoch: int = 0  # how often the run has gone back to a checkpoint; what was asked before that is of no use


@dataclass(frozen=True)
class Entry:
    """One parameter inside a bucket: Hugging Face name, torch dtype name, shape, byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """Byte offset just past this parameter. RecordError for a dtype of unknown size."""
        if self.dtype not in DTYPE_BYTES:
            raise RecordError(
                f"bucket entry {self.name}: dtype {self.dtype!r}, expected one of "
                f"{', '.join(DTYPE_BYTES)}"
            )
        return self.offset + math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Parameters in the object store: `ref` is a uint8 array holding `entries`; `digest` its checksum."""

    ref: Any
    entries: list[Entry]
    digest: str


@dataclass(frozen=True)
class Probe:
    """Sequences with the learner's log-probs float32 of ids[1:]; a generator must find the same within `tolerance`."""

    ids: list[list[int]]
    logprobs: list[np.ndarray]
    tolerance: float


@dataclass(frozen=True)
class Published:
    """One version of the policy, whole: what every generator loads and proves."""

    version: int
    buckets: list[Bucket]
    probe: Probe

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets. A bucket ends where its last entry ends."""
        return sum(b.entries[-1].end for b in self.buckets if b.entries)


def checksum(buffer: np.ndarray) -> str:
    """xxh3-128 of a contiguous uint8 array, as hex."""
    return xxhash.xxh3_128_hexdigest(memoryview(buffer))


def conform(batch: pa.RecordBatch, schema: pa.Schema, name: str) -> pa.RecordBatch:
    """Return `batch` if it has exactly `schema`, no nulls where none may be; raise RecordError otherwise."""
    if not batch.schema.equals(schema):
        missing = [f.name for f in schema if f.name not in batch.schema.names]
        wrong = [
            f"{f.name} is {batch.schema.field(f.name).type}, expected {f.type}"
            for f in schema
            if f.name in batch.schema.names and batch.schema.field(f.name).type != f.type
        ]
        extra = [n for n in batch.schema.names if n not in schema.names]
        raise RecordError(
            f"{name}: missing columns {missing}, wrong types {wrong}, unexpected columns {extra}"
        )
    for f in schema:
        if not f.nullable and batch.column(f.name).null_count:
            row = batch.column(f.name).is_null().to_pylist().index(True)
            raise RecordError(f"{name}: column {f.name}, row {row}: null where a value is required")
    return batch


def check_rollout(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A ROLLOUT whose token columns agree: equal lengths, finite log-probs <= 0, known finish reasons."""
    conform(batch, ROLLOUT, "rollout")
    lengths = list_lengths(batch.column("completion_ids"))
    for column in ("behaviour_logprobs", "versions"):
        other = list_lengths(batch.column(column))
        if (lengths != other).any():
            row = int(np.flatnonzero(lengths != other)[0])
            raise RecordError(
                f"rollout: row {row}: {lengths[row]} completion_ids but {other[row]} {column}"
            )
    _check_logprobs(
        batch, "behaviour_logprobs", "rollout", "The generator's weights or its engine are broken"
    )
    unknown = set(batch.column("finish_reason").to_pylist()) - set(FINISH_REASONS)
    if unknown:
        raise RecordError(
            f"rollout: finish_reason {sorted(unknown)} unknown, expected one of {FINISH_REASONS}"
        )
    return batch


def check_reference(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A REFERENCE of finite log-probs <= 0."""
    conform(batch, REFERENCE, "reference")
    _check_logprobs(
        batch,
        "ref_logprobs",
        "reference",
        "The reference model is broken, or overflows in model.dtype",
    )
    return batch


def _check_logprobs(batch: pa.RecordBatch, column: str, record: str, cause: str) -> None:
    """Raise RecordError naming group, sample and token of the first value that is not finite or is above 0."""
    values = batch.column(column).flatten().to_numpy(zero_copy_only=False)
    bad = ~np.isfinite(values) | (values > 1e-3)
    if bad.any():
        at, ends = int(np.flatnonzero(bad)[0]), np.cumsum(list_lengths(batch.column(column)))
        row = int(np.searchsorted(ends, at, side="right"))
        raise RecordError(
            f"{record}: group {batch.column('group_id')[row]}, sample {batch.column('sample_index')[row]}, token "
            f"{at - (int(ends[row - 1]) if row else 0)}: {column} is {values[at]}, which is not a log-probability. "
            f"{cause}."
        )


def check_scored(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A SCORED batch in which exactly the rows with status "ok" carry a finite reward (DESIGN invariant 4)."""
    conform(batch, SCORED, "scored")
    for row, (status, reward) in enumerate(
        zip(batch.column("status").to_pylist(), batch.column("reward").to_pylist(), strict=True)
    ):
        if status not in STATUSES:
            raise RecordError(f"scored: row {row}: status {status!r}, expected one of {STATUSES}")
        if (status == "ok") != (reward is not None and np.isfinite(reward)):
            raise RecordError(
                f"scored: row {row}: status {status!r} with reward {reward}; "
                "exactly the rows with status ok carry a finite reward"
            )
    steps = zip(
        batch.column("step_rewards").to_pylist(), batch.column("step_ends").to_pylist(), strict=True
    )
    for row, (rewards, ends) in enumerate(steps):
        if len(rewards or []) != len(ends or []) or not np.isfinite(rewards or []).all():
            raise RecordError(
                f"scored: row {row}: step rewards {rewards} with ends {ends}: expected as many of each, "
                "and finite rewards"
            )
    return batch


def check_labelled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A LABELLED of labels in [0, 1], one an end, and ends in order within the completion."""
    conform(batch, LABELLED, "labelled")
    columns = [batch.column(name).to_pylist() for name in ("completion_ids", "ends", "labels")]
    for row, (ids, ends, labels) in enumerate(zip(*columns, strict=True)):
        if (
            not ends
            or len(ends) != len(labels)
            or ends != sorted(set(ends))
            or not 0 <= ends[0] <= ends[-1] < len(ids)
        ):
            raise RecordError(
                f"labelled: row {row}: ends {ends} with labels {labels} of {len(ids)} tokens: expected "
                "one label an end, and ends in order within the completion"
            )
        if not all(0.0 <= v <= 1.0 for v in labels):  # a NaN fails too
            raise RecordError(f"labelled: row {row}: labels {labels}, expected each in [0, 1]")
    return batch


def list_lengths(column: pa.Array) -> np.ndarray:
    """int64 [rows]: length of each list."""
    return column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)


def ragged(column: pa.Array) -> list[np.ndarray]:
    """Zero-copy views of each row of a list column."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(list_lengths(column))
    return np.split(values, ends[:-1]) if len(ends) else []
