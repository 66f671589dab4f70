"""Labels for the steps of the policy's answers, from completions of their prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from actors.data.prompt import Prompt
from actors.records import GroupMeta, PromptRow, SamplingParams
from actors.rollouts import Group
from conf.schema import Config
from learner.algorithms.assemble import read_scores
from learner.stages.engines import Request
from learner.stages.sampling import SamplingEngines
from reward_service.step_labels.annotation import Label, label
from reward_service.step_labels.answers import PrefixScalars
from reward_service.step_labels.tasks import AnnotationTasks


class Annotator:
    """Annotates one part.

    Its group ids lie below -1 - `first`, so what is sampled does not depend on earlier parts.
    """

    def __init__(self, cfg: Config, engines: SamplingEngines, first: int) -> None:
        self.cfg, self.engines = cfg, engines
        self.tasks = AnnotationTasks(
            engines.policy.tokenizer, cfg.data.steps, cfg.rollout.timeout_s
        )
        self.next_id = -1 - first

    def sample(self, requests: list[Request]) -> tuple[list[Group], list[pa.RecordBatch]]:
        """Groups and SCORED batches of these requests; their ids follow those of the last call."""
        first, self.next_id = self.next_id, self.next_id - len(requests)
        return self.engines.sample(requests, first)

    def part(self, prompts: Sequence[Prompt]) -> tuple[pa.Table, dict[str, int]]:
        """(rows of ANNOTATION, counts) of the answers to `prompts`.

        Answers that cannot be labelled are counted (dropped) and left out. prefix_tokens counts the
        tokens of the prompts that completions start from; cached_tokens counts those of them that
        were in the prefix cache.
        """
        a = self.cfg.annotate
        groups, scored = self.sample(
            [self.engines.request(p, a.answers, a.temperature) for p in prompts]
        )
        prefixes, answers = self.tasks.cut(
            [g.prompt for g in groups],
            read_scores(scored).accuracy.tolist(),
            [g.table for g in groups],
        )
        labels, completed = self.complete(prefixes, {p.prompt_id: p for p in reversed(prompts)})
        counts, table = self.tasks.annotate(answers, labels)
        counts |= {
            "completions": sum(len(m.lengths) for m in completed),
            "tokens": int(sum(g.meta.lengths.sum() for g in groups))
            + int(sum(m.lengths.sum() for m in completed)),
            "prefix_tokens": sum(m.prompt_tokens * len(m.lengths) for m in completed),
            "cached_tokens": sum(m.cached_tokens for m in completed),
        }
        return self.tasks.fetch(table), counts

    def complete(
        self, prefixes: Sequence[tuple[PrefixScalars, PromptRow]], prompts: Mapping[str, Prompt]
    ) -> tuple[list[Label | None], list[GroupMeta]]:
        """Complete every prefix. Returns the label of each, and the scalars of the completions.

        `prompts` by id.
        """
        a, r = self.cfg.annotate, self.cfg.rollout
        requests = [
            Request(
                replace(prompts[prefix.prompt_id], prefill=prefix.prefill),
                ids,
                a.completions,
                SamplingParams(r.max_tokens - prefix.tokens, r.temperature),
            )
            for prefix, ids in prefixes
        ]
        groups, scored = self.sample(requests) if requests else ([], [])
        labels = [label(read_scores([batch]).accuracy.tolist()) for batch in scored]
        return labels, [g.meta for g in groups]
