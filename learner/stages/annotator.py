"""Labels for the steps of the policy's answers to some prompts, from completions of their prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.data.prompt import Prompt
from actors.records import GroupMeta, SamplingParams
from actors.rollouts import Group
from conf.schema import Config
from learner.algorithms.assemble import read_scores
from learner.stages.engines import Request
from learner.stages.sampling import SamplingEngines
from reward_service.step_labels.annotation import (
    Label,
    Prefix,
    label,
    prefixes,
    step_labels,
)
from reward_service.step_labels.steps import step_ends, sum_steps, token_at

ROW = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("question", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("completion", pa.string()),
        ("ends", pa.list_(pa.int32())),
        ("soft", pa.list_(pa.float64())),
        ("hard", pa.list_(pa.float64())),
        (
            "exact",
            pa.list_(pa.float64()),
        ),  # what the task itself says of each step; null where it says nothing
        ("accuracy", pa.float64()),
    ]
)


@dataclass(frozen=True)
class _Answer:
    prompt: Prompt
    prompt_ids: list[int]
    ids: list[int]
    text: str
    ends: list[int]
    accuracy: float  # nan: not judged


class Annotator:
    """One part. Its group ids lie below -1 - `first`, so what is sampled does not depend on which parts came before."""

    def __init__(self, cfg: Config, engines: SamplingEngines, first: int) -> None:
        self.cfg, self.engines = cfg, engines
        self.next_id = -1 - first

    def sample(self, requests: list[Request]) -> tuple[list[Group], list[pa.RecordBatch]]:
        """Groups and SCORED batches of these requests; their ids follow those of the last call."""
        first, self.next_id = self.next_id, self.next_id - len(requests)
        return self.engines.sample(requests, first)

    def part(self, prompts: Sequence[Prompt]) -> tuple[pa.Table, dict[str, int]]:
        """(rows of ROW, counts) of the answers to `prompts`; those that cannot be labelled are counted and left out.

        prefix_tokens: of the prompts that completions begin with, of which cached_tokens had been worked out."""
        a = self.cfg.annotate
        groups, scored = self.sample(
            [self.engines.request(p, a.answers, a.temperature) for p in prompts]
        )
        answers = self.answers(groups, read_scores(scored).accuracy)
        found, metas = self.complete(answers)
        rows, dropped = [], 0
        for answer in answers:
            labels = step_labels(
                answer.ids, answer.ends, answer.accuracy, found[answer.prompt.prompt_id]
            )
            if labels is None:
                dropped += 1
                continue
            soft, hard = (list(column) for column in zip(*labels, strict=True))
            rows.append(
                (
                    answer.prompt.prompt_id,
                    answer.prompt.question,
                    answer.prompt_ids,
                    answer.ids,
                    answer.text,
                    answer.ends,
                    soft,
                    hard,
                    exact(answer, self.decode),
                    answer.accuracy,
                )
            )
        columns = [list(c) for c in zip(*rows, strict=True)] or [[]] * len(ROW)
        table = pa.table(
            [pa.array(c, f.type) for c, f in zip(columns, ROW, strict=True)], schema=ROW
        )
        return table, {
            "answers": len(rows),
            "dropped": dropped,
            "steps": sum(len(r[5]) for r in rows),
            "completions": sum(len(m.lengths) for m in metas),
            "tokens": sum(len(x.ids) for x in answers) + int(sum(m.lengths.sum() for m in metas)),
            "prefix_tokens": sum(m.prompt_tokens * len(m.lengths) for m in metas),
            "cached_tokens": sum(m.cached_tokens for m in metas),
        }

    def answers(self, groups: Sequence[Group], accuracy: np.ndarray) -> list[_Answer]:
        """The samples of some groups, in order, with their steps; `accuracy` float [samples]."""
        out: list[_Answer] = []
        for group in groups:
            table = ray.get(group.table, timeout=self.cfg.rollout.timeout_s)
            for prompt_ids, ids in zip(
                *(table.column(c).to_pylist() for c in ("prompt_ids", "completion_ids")),
                strict=True,
            ):
                text = self.decode(ids)
                ends = step_ends(self.cfg.data.steps, group.prompt.prefill, text, ids, self.decode)
                out.append(
                    _Answer(group.prompt, prompt_ids, ids, text, ends, float(accuracy[len(out)]))
                )
        return out

    def complete(
        self, answers: Sequence[_Answer]
    ) -> tuple[dict[str, dict[Prefix, Label | None]], list[GroupMeta]]:
        """(labels by prompt_id and prefix, scalars of the completions) of every distinct prefix of the answers.

        Prefixes of one prompt are asked for one after the other: they share blocks of vLLM's prefix cache."""
        a, r = self.cfg.annotate, self.cfg.rollout
        asked: list[tuple[_Answer, Prefix]] = []
        for prompt_id in dict.fromkeys(x.prompt.prompt_id for x in answers):
            same = [x for x in answers if x.prompt.prompt_id == prompt_id]
            asked += [(same[0], prefix) for prefix in prefixes([(x.ids, x.ends) for x in same])]
        requests = [
            Request(
                replace(x.prompt, prefill=x.prompt.prefill + self.decode(prefix)),
                [*x.prompt_ids, *prefix],
                a.completions,
                SamplingParams(r.max_tokens - len(prefix), r.temperature),
            )
            for x, prefix in asked
        ]
        groups, scored = self.sample(requests) if requests else ([], [])
        found: dict[str, dict[Prefix, Label | None]] = {x.prompt.prompt_id: {} for x in answers}
        for (x, prefix), batch in zip(asked, scored, strict=True):
            found[x.prompt.prompt_id][prefix] = label(read_scores([batch]).accuracy.tolist())
        return found, [g.meta for g in groups]

    def decode(self, ids: Sequence[int]) -> str:
        return self.engines.policy.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def exact(answer: _Answer, decode: Any) -> list[float | None] | None:
    """Whether each step is right, for sums, where the task itself tells; the last is whether the answer is."""
    if not answer.prompt.data_source.startswith("arithmetic"):
        return None
    prefill = answer.prompt.prefill
    known = {
        token_at(answer.ids, end - len(prefill), decode): float(right)
        for end, right in sum_steps(answer.prompt.question, prefill + answer.text)
        if end > len(prefill)
    }
    return [known.get(end) for end in answer.ends[:-1]] + [answer.accuracy]
