"""The records of the hand-offs between the parts: one Arrow schema each, checked at each hand-off.

prompts -> ROLLOUT -> SCORED -> PLAN -> the learner. Token columns stay in the object store; the
driver holds references and per-sample scalars (DESIGN invariant 8).

One row of ROLLOUT is one completion:

    group_id             17
    prompt_id            "a3f1"
    sample_index         0
    prompt_ids           [5, 18, 40]
    completion_ids       [3, 21, 2]
    behaviour_logprobs   [-0.1, -1.2, -0.0]
    versions             [4, 4, 5]
    finish_reason        "stop"

`versions[t]` is the version of the policy that sampled token t. `finish_reason` is vLLM's own word,
"stop" or "length". Masks come from the lengths and finish reasons, never from searching for a token
id (DESIGN invariant 1).
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

# Prompts that were built from token ids (prefixes of answers), one row each.
PROMPT = pa.schema(
    [
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
        # Null unless steps are rewarded and the status is "ok".
        pa.field("step_rewards", pa.list_(pa.float64())),
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
# What the driver tells the learner about each sample: where its tokens are, and their weight.
PLAN = pa.schema(
    [
        # Index into the list of ROLLOUT tables that goes with the plan, and the row in that table.
        pa.field("table", pa.int32(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),  # 0 where not valid
        # Valid: the reward's status is "ok" and nothing masks the sample.
        pa.field("valid", pa.bool_(), nullable=False),
        # NaN where the learner computes the advantage from its log-probs.
        pa.field("advantage", pa.float64(), nullable=False),
        # Weight of each completion token, normalised over the whole optimizer step.
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("micro_batch", pa.int32(), nullable=False),
        pa.field("update", pa.int32(), nullable=False),  # index of the optimizer step of this batch
        pa.field("step_rewards", pa.list_(pa.float64())),  # null without process supervision
        pa.field("step_ends", pa.list_(pa.int32())),
    ]
)
# Labelled answers, on which a reward model is trained and evaluated. One row an answer.
LABELLED = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        # Index of the last token of each step; for an outcome label, of the whole answer.
        pa.field("ends", pa.list_(pa.int32()), nullable=False),
        pa.field("labels", pa.list_(pa.float64()), nullable=False),  # in [0, 1], one for each end
        # Two rows of a pair have the same number, the chosen one first; -1 for a row in no pair.
        pa.field("pair", pa.int64(), nullable=False),
        # The iteration of iterative RL in which it was sampled; 0 for older answers.
        pa.field("iteration", pa.int32(), nullable=False),
    ]
)


class RecordError(ValueError):
    """A record does not satisfy its schema. The message names the record, column and row."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled. `temperature` > 0; `max_tokens` bounds one completion."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class GroupMeta:
    """Scalars of one finished group of n samples: all that the driver sees of it."""

    group_id: int
    prompt_id: str
    prompt_tokens: int
    lengths: np.ndarray  # int64 [n], completion tokens
    finish_reasons: tuple[str, ...]
    version_min: int
    version_max: int
    generator: str = ""
    # Prompt tokens, over all samples, whose keys and values were in the prefix cache.
    cached_tokens: int = 0


@dataclass(frozen=True)
class PromptRow:
    """The token ids of a prompt by reference: row `row` of a PROMPT batch in the object store."""

    table: Any  # object reference
    row: int


@dataclass(frozen=True)
class GroupRequest:
    """A prompt and the seeds of its completions: `seeds[i]` alone decides what sample i draws.

    `epoch` counts how often the run has gone back to a checkpoint. Requests of an earlier epoch are
    not worked on.
    """

    group_id: int
    prompt_id: str
    prompt_ids: list[int] | PromptRow
    seeds: list[int]
    sampling: SamplingParams
    epoch: int = 0


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
    """Parameters in the object store. `ref`: uint8 array of the entries; `digest`: its checksum."""

    ref: Any
    entries: list[Entry]
    digest: str


@dataclass(frozen=True)
class Probe:
    """Sequences by which a generator proves that its weights are the learner's.

    `logprobs`: the learner's, float32 [len - 1] for each sequence, of ids[1:]. A generator must
    compute the same within `tolerance`.
    """

    ids: list[list[int]]
    logprobs: list[np.ndarray]
    tolerance: float


@dataclass(frozen=True)
class Published:
    """One version of the policy: all of its weights, and the probe that proves they were loaded."""

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
    """Return `batch` if it has exactly this schema and no null in a column that allows none.

    Raises RecordError, naming the record `name`, otherwise.
    """
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
    """Return a ROLLOUT unchanged. Raises RecordError unless its token columns have equal lengths,
    its log-probs are finite and at most 0, and its finish reasons are known."""
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
    """Return a REFERENCE unchanged. RecordError unless its log-probs are finite and at most 0."""
    conform(batch, REFERENCE, "reference")
    _check_logprobs(
        batch,
        "ref_logprobs",
        "reference",
        "The reference model is broken, or overflows in model.dtype",
    )
    return batch


def _check_logprobs(batch: pa.RecordBatch, column: str, record: str, cause: str) -> None:
    """Raise RecordError, naming group, sample and token, for the first value that is no log-prob.

    Rounding may leave a log-prob slightly above 0.
    """
    values = batch.column(column).flatten().to_numpy(zero_copy_only=False)
    bad = ~np.isfinite(values) | (values > 1e-3)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        ends = np.cumsum(list_lengths(batch.column(column)))
        row = int(np.searchsorted(ends, first, side="right"))
        token = first - (int(ends[row - 1]) if row else 0)
        group, sample = (batch.column(name)[row] for name in ("group_id", "sample_index"))
        raise RecordError(
            f"{record}: group {group}, sample {sample}, token {token}: {column} is "
            f"{values[first]}, which is not a log-probability. {cause}."
        )


def check_scored(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a SCORED batch unchanged. Raises RecordError unless exactly the rows with status "ok"
    have a finite reward (DESIGN invariant 4), and every step reward is finite and has an end."""
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
                f"scored: row {row}: step rewards {rewards} with ends {ends}: expected as many of "
                "each, and finite rewards"
            )
    return batch


def check_labelled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a LABELLED batch unchanged. Raises RecordError unless labels are in [0, 1], one for
    each end, and ends are in order within the completion."""
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
                f"labelled: row {row}: ends {ends} with labels {labels} of {len(ids)} tokens: "
                "expected one label an end, and ends in order within the completion"
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
