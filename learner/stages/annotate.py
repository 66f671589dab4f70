"""stage=annotate: a label for each step of the policy's answers, from what becomes of them (Math-Shepherd, 2312.08935).

    prompts -> answers -> steps -> prefixes -> completions -> rewards -> labels -> RUN_DIR/annotations.parquet

Written in parts of PART prompts, each a function of the settings alone, so that `resume=auto` makes what is missing.
Unlike in training, token ids come to the controller here: prefixes are prompts, and prompts are its business.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from actors.data.prompt import Prompt
from actors.data.stream import PromptStream
from actors.records import GroupMeta, SamplingParams
from actors.rollouts import Group
from cluster.monitoring.progress import duration
from cluster.stopping import RunError, Stopping
from conf.schema import Config
from learner.algorithms.assemble import read_scores
from learner.checkpoints import checkpoint
from learner.stages.sampling import Engines, Request
from reward_service.step_labels.annotation import (
    Label,
    Prefix,
    correlation,
    label,
    prefixes,
    step_labels,
)
from reward_service.step_labels.steps import step_ends, sum_steps, token_at

PART = 16  # prompts
IDS = 1_000_000  # group ids that a part may use
FOLDER, SETTINGS = "annotations", "settings.json"
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


def annotate(cfg: Config, run_dir: Path, stopping: Stopping) -> None:
    """All parts that are not there yet, then annotations.parquet and summary.json."""
    began = time.monotonic()
    folder = run_dir / FOLDER
    begin(cfg, folder)
    engines = Engines(cfg, run_dir)
    prompts = PromptStream(engines.train, cfg.seed).next(cfg.annotate.prompts)
    parts = [prompts[i : i + PART] for i in range(0, len(prompts), PART)]
    missing = [k for k in range(len(parts)) if not whole(folder / name(k))]
    if missing:
        engines.start()
    stopping.gently = True
    spent = 0.0
    for done, k in enumerate(missing, 1):
        started = time.monotonic()
        table, counts = Annotator(cfg, engines, k * IDS).part(parts[k])
        counts["seconds"] = time.monotonic() - started
        write(table.replace_schema_metadata({"counts": json.dumps(counts)}), folder / name(k))
        spent += counts["seconds"]
        print(
            f"volley: part {k + 1}/{len(parts)}: {table.num_rows} answers, {counts['steps']} steps, "
            f"{counts['completions']} completions  left {duration(spent / done * (len(missing) - done))}",
            flush=True,
        )
        if stopping.is_set():
            raise KeyboardInterrupt
    stopping.gently = False
    if missing:
        engines.stop()
    tables = [pq.read_table(folder / name(k)) for k in range(len(parts))]
    summary = summarise(tables) | {
        "experiment": cfg.experiment,
        "seed": cfg.seed,
        "prompts": len(prompts),
        "wall_s": round(time.monotonic() - began, 1),
    }
    write(
        pa.concat_tables([t.replace_schema_metadata() for t in tables]),
        run_dir / "annotations.parquet",
    )
    beside = run_dir / "summary.json.partial"
    beside.write_text(json.dumps(summary, indent=1) + "\n")
    beside.rename(run_dir / "summary.json")
    told = [
        f"{kind} {r:.3f}"
        for kind in ("soft", "hard")
        if (r := summary[f"{kind}_correlation"]) is not None
    ]
    agree = (
        f"; labels correlate with the exact check of the steps: {', '.join(told)}" if told else ""
    )
    print(
        f"volley: {summary['answers']} answers, {summary['dropped']} dropped, {summary['steps']} steps{agree}\n"
        f"volley: done in {summary['wall_s']:.0f} s; the labels are in {run_dir / 'annotations.parquet'}",
        flush=True,
    )


def begin(cfg: Config, folder: Path) -> None:
    """Parts that are there are gone on with only if asked for, and only under the settings they were made with."""
    there = folder / SETTINGS
    if there.is_file():
        if cfg.resume != "auto":
            raise RunError(
                f"{folder}: holds annotations already. Give another run_dir, or go on: resume=auto."
            )
        checkpoint.check_config(cfg, json.loads(there.read_text()), str(folder))
        return
    folder.mkdir(parents=True, exist_ok=True)
    beside = there.with_suffix(".partial")
    beside.write_text(json.dumps(checkpoint.as_dict(cfg), indent=1))
    beside.rename(there)


def name(part: int) -> str:
    return f"part_{part:05d}.parquet"


def whole(file: Path) -> bool:
    """Whether a part is there and can be read to its end."""
    try:
        pq.read_table(file)
    except (OSError, pa.ArrowInvalid):
        return False
    return True


def write(table: pa.Table, file: Path) -> None:
    beside = file.with_suffix(".partial")
    pq.write_table(table, beside)
    beside.rename(file)


class Annotator:
    """One part. Its group ids lie below -1 - `first`, so what is sampled does not depend on which parts came before."""

    def __init__(self, cfg: Config, engines: Engines, first: int) -> None:
        self.cfg, self.engines = cfg, engines
        engines.sampled = first

    def part(self, prompts: Sequence[Prompt]) -> tuple[pa.Table, dict[str, int]]:
        """(rows of ROW, counts) of the answers to `prompts`; those that cannot be labelled are counted and left out.

        prefix_tokens: of the prompts that completions begin with, of which cached_tokens had been worked out."""
        a = self.cfg.annotate
        groups, scored = self.engines.sample(
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
        groups, scored = self.engines.sample(requests) if requests else ([], [])
        found: dict[str, dict[Prefix, Label | None]] = {x.prompt.prompt_id: {} for x in answers}
        for (x, prefix), batch in zip(asked, scored, strict=True):
            found[x.prompt.prompt_id][prefix] = label(read_scores([batch]).accuracy.tolist())
        return found, [g.meta for g in groups]

    def decode(self, ids: Sequence[int]) -> str:
        return self.engines.tokenizer.decode(
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


def summarise(tables: Sequence[pa.Table]) -> dict[str, Any]:
    """Counts of all parts, and how the labels agree with the exact check: of the steps that were completed, and of all
    (the last step of an answer, whose label is its accuracy, included)."""
    counts = [json.loads(t.schema.metadata[b"counts"]) for t in tables]
    found: dict[str, Any] = {key: sum(c[key] for c in counts) for key in counts[0]}
    found |= {f"{key}_per_s": found[key] / found["seconds"] for key in ("steps", "tokens")}
    found["cached_share"] = (
        found["cached_tokens"] / found["prefix_tokens"] if found["prefix_tokens"] else None
    )
    rows = [r for t in tables for r in t.select(["soft", "hard", "exact"]).to_pylist()]
    for kind in ("soft", "hard"):
        found[f"{kind}_mean"] = float(np.mean([v for r in rows for v in r[kind]])) if rows else None
    for which, cut in (("", -1), ("_all", None)):
        pairs = [
            (s, h, e)
            for r in rows
            if r["exact"]
            for s, h, e in zip(r["soft"][:cut], r["hard"][:cut], r["exact"][:cut], strict=True)
            if e is not None
        ]
        found |= {
            f"checked_steps{which}": len(pairs),
            f"exact_mean{which}": float(np.mean([e for *_, e in pairs])) if pairs else None,
        }
        for i, kind in enumerate(("soft", "hard")):
            found[f"{kind}_correlation{which}"] = correlation(
                [p[i] for p in pairs], [p[2] for p in pairs]
            )
    return found
