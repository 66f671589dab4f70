"""The stage that labels each step of the policy's answers by what becomes of them.

Math-Shepherd (2312.08935):

    prompts -> answers -> steps -> prefixes -> completions -> rewards -> labels -> table

A step of this stage labels one part of PART prompts. A part is a function of the settings alone and
is a file of its own, so that `resume=auto` makes the parts that are missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.data.prompt import Prompt
from actors.data.stream import PromptStream
from cluster.files import atomic, write_json
from cluster.monitoring.progress import duration
from cluster.stopping import RunError
from conf.schema import Config
from learner.checkpoints import saved_settings
from learner.launch import Launch
from learner.stage import Run, Stage, open_log, plain_progress
from learner.stages.annotator import Annotator
from learner.stages.engines import load_prompts, open_policy
from learner.stages.sampling import SamplingEngines
from learner.state import State
from reward_service.step_labels.annotation import correlation

PART = 16  # prompts
IDS = 1_000_000  # group ids that a part may use
FOLDER, SETTINGS = "annotations", "settings.json"
OUTPUT = "annotations.parquet"


@dataclass(frozen=True)
class AnnotateRun(Run):
    """The handles of this stage, on top of those of every stage."""

    engines: SamplingEngines | None  # None where every part is there already
    parts: list[list[Prompt]]
    missing: list[int]  # parts that are to be made
    folder: Path


def build(launch: Launch, state: State, stack: ExitStack) -> AnnotateRun:
    """See which parts are missing, and create the actors that make them."""
    folder = launch.run_dir / FOLDER
    begin(launch.cfg, folder)
    cfg, policy = open_policy(launch.cfg, launch.run_dir)
    train, heldout = load_prompts(cfg, policy)
    prompts = PromptStream(train, cfg.seed).next(cfg.annotate.prompts)
    parts = [prompts[i : i + PART] for i in range(0, len(prompts), PART)]
    missing = [k for k in range(len(parts)) if not whole(folder / name(k))]
    engines = SamplingEngines.create(cfg, policy, train, heldout) if missing else None
    return AnnotateRun(
        launch=launch,
        cfg=cfg,
        log=open_log(launch, state, len(missing), stack),
        progress=plain_progress(cfg, len(missing)),
        learner=engines.learner if engines else None,
        engines=engines,
        parts=parts,
        missing=missing,
        folder=folder,
    )


def ready(run: AnnotateRun, state: State, saved: Path | None) -> None:
    """Wait until the generators have proved the weights."""
    if run.engines:
        run.engines.start()


def rewind(run: AnnotateRun, state: State, saved: Path | None) -> None:
    """Bring the weights of the new learner to the generators. Parts that are done stay."""
    run.engines.rewind()


def step(run: AnnotateRun, state: State, number: int) -> None:
    """Label one part and write it; a part that is there already is left as it is."""
    k = run.missing[number - 1]
    file = run.folder / name(k)
    if whole(file):
        return
    began = time.monotonic()
    table, counts = Annotator(run.cfg, run.engines, k * IDS).part(run.parts[k])
    counts["seconds"] = time.monotonic() - began
    write(table.replace_schema_metadata({"counts": json.dumps(counts)}), file)
    state.generating_s += counts["seconds"]
    left_s = state.generating_s / number * (len(run.missing) - number)
    print(
        f"volley: part {k + 1}/{len(run.parts)}: {table.num_rows} answers, "
        f"{counts['steps']} steps, {counts['completions']} completions  left {duration(left_s)}",
        flush=True,
    )


def finish(run: AnnotateRun, state: State) -> dict[str, Any]:
    """End the actors, and write annotations.parquet and summary.json from all parts."""
    if run.engines:
        run.engines.stop()
    cfg, run_dir = run.cfg, run.launch.run_dir
    tables = [pq.read_table(run.folder / name(k)) for k in range(len(run.parts))]
    summary = summarise(tables) | {
        "experiment": cfg.experiment,
        "seed": cfg.seed,
        "prompts": sum(map(len, run.parts)),
        "wall_s": round(time.monotonic() - run.launch.started, 1),
    }
    write(pa.concat_tables([t.replace_schema_metadata() for t in tables]), run_dir / OUTPUT)
    write_json(run_dir / "summary.json", summary)
    return summary


def conclude(run: AnnotateRun, state: State, summary: dict[str, Any], setup_s: float) -> None:
    """Say how many labels there are, and how they agree with the exact check."""
    run.log.close()
    known = [
        f"{kind} {value:.3f}"
        for kind in ("soft", "hard")
        if (value := summary[f"{kind}_correlation"]) is not None
    ]
    agreement = (
        f"; labels correlate with the exact check of the steps: {', '.join(known)}" if known else ""
    )
    print(
        f"volley: {summary['answers']} answers, {summary['dropped']} dropped, "
        f"{summary['steps']} steps{agreement}\n"
        f"volley: done in {summary['wall_s']:.0f} s; "
        f"the labels are in {run.launch.run_dir / OUTPUT}",
        flush=True,
    )


STAGE = Stage(
    name="annotate",
    inputs={"model": "model.path", "data": "data.kind"},
    outputs={"annotations": OUTPUT},
    build=build,
    ready=ready,
    rewind=rewind,
    steps=lambda run: len(run.missing),
    step=step,
    finish=finish,
    conclude=conclude,
)


# ---- parts ---------------------------------------------------------------------------------------


def begin(cfg: Config, folder: Path) -> None:
    """Parts that are there are gone on with only if asked for, and only under the settings they
    were made with.
    """
    there = folder / SETTINGS
    if there.is_file():
        if cfg.resume != "auto":
            raise RunError(
                f"{folder}: holds annotations already. Give another run_dir, or go on: resume=auto."
            )
        saved_settings.check_config(cfg, json.loads(there.read_text()), str(folder))
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(there, saved_settings.as_dict(cfg))


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
    with atomic(file) as partial:
        pq.write_table(table, partial)


def summarise(tables: Sequence[pa.Table]) -> dict[str, Any]:
    """Counts of all parts, and how the labels agree with the exact check: of the steps that were
    completed, and of all (the last step of an answer, whose label is its accuracy, included).
    """
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
