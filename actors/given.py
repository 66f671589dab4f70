"""Groups of given answers, built in Ray tasks: the driver holds none of their token columns.

The groups enter the loop where sampled ones do. Their ROLLOUT tables stay in the object store; the
driver receives references to them, the scalars of each group, and its SCORED batch.
actors/data/answers.py decides what the records contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayTaskError

from actors.data.answers import COLUMNS, GivenRequest, check_answers, records_of_groups
from actors.rollouts import Group
from cluster.environment import process_env
from cluster.supervision.remote import get

__all__ = ["COLUMNS", "GivenRequest", "given_groups"]
TIMEOUT_S = 300.0  # for the records of one call: tokenising, and starting a worker process


def given_groups(
    requests: Sequence[GivenRequest],
    tokenizer: Any,
    kind: str,
    seed: int,
    max_tokens: int,
    timeout_s: float = TIMEOUT_S,
) -> list[tuple[Group, pa.RecordBatch]]:
    """(Group, SCORED batch) of each request, in order: one Ray task for all of them.

    `tokenizer` may be an object reference. `kind` is a key of COLUMNS. Raises ConfigError where a
    prompt has no answers of this kind, and DeadlineExceeded after `timeout_s` seconds.
    """
    if not requests:
        return []
    for request in requests:
        check_answers(request.prompt, kind)
    task = ray.remote(records_of_groups).options(
        num_cpus=0, num_returns=1 + len(requests), runtime_env={"env_vars": process_env()}
    )
    records_ref, *tables = task.remote(list(requests), tokenizer, kind, seed, max_tokens)
    last = requests[-1].group_id
    try:
        records = get(
            records_ref,
            timeout_s,
            f"given answers: groups {requests[0].group_id} to {last}",
            "the log of the task records_of_groups in the session's logs folder of Ray",
        )
    except RayTaskError as error:
        raise error.cause from None  # what the task raised, without Ray's text
    return [
        (Group(request.prompt, meta, table), scored)
        for request, (meta, scored), table in zip(requests, records, tables, strict=True)
    ]
