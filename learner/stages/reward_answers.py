"""Files of labelled answers.

Their tokens are read and written by Ray tasks and never by the driver.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from cluster.files import atomic
from cluster.supervision.remote import get
from cluster.supervision.supervisor import tell
from conf.schema import Config
from reward_service.models.labelled import Answers, of_record, read, record

FILES_S = 600.0  # deadline of reading or writing a file of answers
HINT = "the logs of Ray's workers in the session's logs folder of Ray"


def save_answers(file: Path, answers: Answers, iteration: int) -> None:
    """Write answers as one Parquet file of LABELLED records; it is either whole or not there."""
    get(write_file.remote(str(file), answers, iteration), FILES_S, f"writing {file}", HINT)


def load_answers(path: str, tokenizer: Any, cfg: Config) -> Answers:
    """The answers of a file or folder.

    Those that are longer than learner.micro_batch_tokens or the model's context are left out, and
    their number is printed.
    """
    rm = cfg.reward_model
    limit = cfg.learner.micro_batch_tokens // (2 if rm.loss == "pairwise" else 1)
    limit = min(limit, tokenizer.model_max_length)
    scalars, table = read_file.remote(path, tokenizer, rm.label, limit)
    answers, dropped = get(scalars, FILES_S, f"reading {path}", HINT)
    if dropped:
        tell(f"{dropped} answers of {path} are left out: over {limit} tokens")
    return replace(answers, tables=[table])


@ray.remote(num_cpus=0)
def write_file(file: str, answers: Answers, iteration: int) -> int:
    """Ray task: write the file, which is whole or absent. Returns the number of rows."""
    batch = record(answers, ray.get(answers.tables, timeout=FILES_S), iteration)
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic(target) as partial:
        pq.write_table(pa.Table.from_batches([batch]), partial)
    return batch.num_rows


@ray.remote(num_cpus=0, num_returns=2)
def read_file(
    path: str, tokenizer: Any, label: str, max_tokens: int
) -> tuple[tuple[Answers, int], pa.RecordBatch]:
    """Ray task: ((scalars of the answers, how many were left out), their LABELLED record)."""
    batch, dropped = read(path, tokenizer, label, max_tokens)
    return (of_record(batch, None), dropped), batch
