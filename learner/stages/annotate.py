"""stage=annotate: a label for each step of the policy's answers (Math-Shepherd, 2312.08935).

    prompts -> answers -> steps -> prefixes -> completions -> rewards -> labels -> RUN_DIR/annotations.parquet

The table is written in parts of PART prompts. Each part is a function of the settings alone, so
`resume=auto` makes the missing ones. Answers and prefixes stay in the object store
(reward_service/step_labels/tasks.py); the driver fetches a finished part only to write its file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.data.prompt import Prompt
from actors.data.stream import PromptStream
from actors.records import GroupMeta, PromptRow, SamplingParams
from cluster.monitoring.progress import duration
from cluster.stopping import RunError, Stopping
from conf.schema import Config
from learner.algorithms.assemble import read_scores
from learner.checkpoints import checkpoint
from learner.stages.sampling import Engines, Request
from reward_service.step_labels.annotation import Label, correlation, label
from reward_service.step_labels.answers import PrefixScalars
from reward_service.step_labels.tasks import AnnotationTasks

PART = 16  # prompts
IDS = 1_000_000  # group ids that a part may use
FOLDER, SETTINGS = "annotations", "settings.json"


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
    """Annotates one part.

    Its group ids lie below -1 - `first`, so what is sampled does not depend on earlier parts.
    """

    def __init__(self, cfg: Config, engines: Engines, first: int) -> None:
        self.cfg, self.engines = cfg, engines
        self.tasks = AnnotationTasks(engines.tokenizer, cfg.data.steps, cfg.rollout.timeout_s)
        engines.sampled = first

    def part(self, prompts: Sequence[Prompt]) -> tuple[pa.Table, dict[str, int]]:
        """(rows of ANNOTATION, counts) of the answers to `prompts`.

        Answers that cannot be labelled are counted (dropped) and left out. prefix_tokens counts the
        tokens of the prompts that completions start from; cached_tokens counts those of them that
        were in the prefix cache.
        """
        a = self.cfg.annotate
        groups, scored = self.engines.sample(
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
        groups, scored = self.engines.sample(requests) if requests else ([], [])
        labels = [label(read_scores([batch]).accuracy.tolist()) for batch in scored]
        return labels, [g.meta for g in groups]


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
