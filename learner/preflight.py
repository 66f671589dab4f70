"""What a run needs, checked before it starts: `preflight=true` prints a table and loads the model; every start makes
the checks that take a moment, without a word where they pass.

Estimates are in cluster/plan.py; the checks of single settings are in conf/schema.py.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil

from actors.data.build import build_dataset
from actors.data.prompt import Prompt
from actors.modeling.loading import ModelError, load_model, load_tokenizer, model_size
from cluster import plan, security
from cluster.connect import target
from conf.schema import Config
from learner.algorithms import parts
from reward_service.models.meaning import NEW, meaning

REACH_S = 10.0  # for a TCP connection to a running cluster
PROBES = 8  # held-out prompts whose right answers are scored
WRONG = "-7654321.5"  # the answer to no question


class PreflightError(ValueError):
    """A run cannot start; the message names the setting, the numbers and what to do."""


class Preflight:
    """The checks of one configuration, in order. Each returns what it saw; `notes` gathers what is no obstacle."""

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg, self.run_dir, self.notes = cfg, run_dir, []
        self.local = not target(cfg)

    def settings(self) -> str:
        cfg, r = self.cfg, self.cfg.rollout
        if not cfg.stage.evaluates:
            return f"stage={cfg.stage.name}, {cfg.steps} steps"
        parts.check(cfg.algorithm)
        each = cfg.samples_per_step // cfg.learner.updates_per_batch
        return (
            f"{r.prompts_per_step} prompts x {r.group_size} answers = {cfg.samples_per_step} samples a step; "
            f"optimizer steps: {cfg.learner.updates_per_batch} of {each}, {each // cfg.learner.ranks} a rank"
        )

    def model(self) -> str:
        self.tokenizer = load_tokenizer(self.cfg.model)
        self.size = model_size(self.cfg.model)
        rows = self.size.vocabulary
        if rows and len(self.tokenizer) > rows:
            self.notes.append(
                f"model.tokenizer={self.cfg.model.tokenizer or self.cfg.model.path}: has "
                f"{len(self.tokenizer)} tokens, the model embeds {rows}: a text with one of the others "
                "stops the run"
            )
        return f"{self.cfg.model.name}: {self.size.parameters:,} parameters, {len(self.tokenizer)} tokens"

    def memory(self) -> str:
        if not self.local:
            return "on a running cluster: not estimated"
        need, more, free = (
            plan.memory(self.cfg, self.size, self.reward_models()),
            plan.passing(self.cfg, self.size),
            free_memory(),
        )
        total = sum(need.values())
        text = f"{plan.show(need)} of {plan.amount(free)} free"
        if total > free:
            raise PreflightError(
                f"memory: needs about {text}. Lower generator.kv_cache_gib, generator.count, "
                "cluster.object_store_mib, reward_model.count or reward.workers, raise "
                "learner.zero_stage, or use model.dtype=bfloat16, smaller models or a larger machine."
            )
        if total + sum(more.values()) > free:
            self.notes.append(
                f"memory may run out in a training step: about {plan.show(more)} on top of {text}. Lower "
                "learner.micro_batch_tokens, or set learner.gradient_checkpointing=true."
            )
        return text

    def reward_models(self) -> dict[str, plan.ModelSize]:
        """Sizes of those that are served, by name. Raises ModelError naming reward.models.NAME.path."""
        found = {}
        for name, model in self.cfg.reward.models.items() if self.cfg.generates else ():
            new = model["path"] == NEW
            head = self.cfg.reward_model.head if new else meaning(model["path"], model).head
            try:
                size = (
                    self.size
                    if new
                    else model_size(
                        replace(self.cfg.model, path=model["path"], init="pretrained", gguf_file="")
                    )
                )
                found[name] = replace(size, frozen=size.parameters if head == "implicit" else 0)
            except ModelError as error:
                raise ModelError(
                    str(error).replace("model.path", f"reward.models.{name}.path", 1)
                ) from error
        return found

    def cluster(self) -> str:
        if self.local:
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", 0))
                except OSError as error:
                    raise PreflightError(
                        f"cluster.address={self.cfg.cluster.address}: no port of 127.0.0.1 can be "
                        f"opened: {error}. Bring the loopback interface up."
                    ) from error
            return "a local one; ports of the loopback can be opened"
        return reach(target(self.cfg), REACH_S)

    def token(self) -> str:
        source, mode = (
            security.token_source(),
            os.environ.get("RAY_AUTH_MODE", "token" if self.local else ""),
        )
        if mode.lower() not in ("token", ""):
            self.notes.append(
                f"RAY_AUTH_MODE={mode}: whoever reaches Ray's ports can run code. Leave it unset."
            )
            return f"not asked for (RAY_AUTH_MODE={mode})"
        if not source and self.local:
            return f"will be made in {security.token_file()}"
        if not source and mode:
            raise PreflightError(
                f"RAY_AUTH_MODE={mode}, but no token is there: set RAY_AUTH_TOKEN, or put the "
                f"cluster's (`ray get-auth-token` on its head node) into {security.token_file()}."
            )
        return f"from {source}" if source else "none is there; the cluster must not ask for one"

    def folder(self) -> str:
        model, all_of_it = plan.published(self.cfg, self.size), plan.disk(self.cfg, self.size)
        apart = self.cfg.checkpoint.folder
        if not apart:
            return self.place("run_dir", self.run_dir, all_of_it)
        seen = self.place("run_dir", self.run_dir, model)
        if "://" in apart:
            return f"{seen}; {apart} is tried when the run starts"
        return (
            f"{seen}; {self.place('checkpoint.folder', Path(apart).absolute(), all_of_it - model)}"
        )

    def place(self, key: str, folder: Path, need: int) -> str:
        there = existing(folder)
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise PreflightError(
                f"{key}={folder}: nothing can be written in {there}: {error}"
            ) from error
        free = shutil.disk_usage(there).free
        text = f"{plan.amount(need)} of {plan.amount(free)} free in {there}"
        if need > free:
            raise PreflightError(
                f"{key}={folder}: what the run leaves there needs about {text} (checkpoint.keep="
                f"{self.cfg.checkpoint.keep}). Free some, lower checkpoint.keep, or choose a larger "
                "disk."
            )
        return text

    def object_store(self) -> str:
        if not self.local or not Path("/dev/shm").is_dir():
            return "not of this machine's /dev/shm"
        need, free = self.cfg.cluster.object_store_mib << 20, shutil.disk_usage("/dev/shm").free
        if need > free:
            raise PreflightError(
                f"cluster.object_store_mib={self.cfg.cluster.object_store_mib}: /dev/shm has only "
                f"{plan.amount(free)} free. Lower it, remove files that ended programs left in "
                "/dev/shm, or give a container more (docker run --shm-size)."
            )
        weights = plan.published(self.cfg, self.size)
        if 2 * weights > need:  # a version is let go only once the next is loaded
            self.notes.append(
                f"two versions of the weights ({plan.amount(2 * weights)}) do not fit into cluster."
                f"object_store_mib={self.cfg.cluster.object_store_mib}: Ray will use the disk, slowly."
            )
        return f"{plan.amount(need)} of {plan.amount(free)} free in /dev/shm"

    # ---- only with preflight=true: what takes longer ----------------------------------------------------------

    def weights(self) -> str:
        model = load_model(self.cfg.model, self.cfg.seed)
        bad = next((n for n, p in model.named_parameters() if not bool(p.isfinite().all())), None)
        if bad:
            raise PreflightError(
                f"model.path={self.cfg.model.path}: {bad} holds values that are not finite. Use "
                "another copy of the model."
            )
        return f"loaded {type(model).__name__}, every value finite"

    def data(self) -> str:
        data = self.cfg.data
        if data.kind == "corpus":
            return "made as it is read"

        def count(text: str) -> int:
            return len(self.tokenizer(text)["input_ids"])

        train, heldout = (build_dataset(data, split, count) for split in ("train", "heldout"))
        self.heldout = heldout.prompts()[: data.heldout_size]
        lost = {reason: n for reason, n in train.dropped.items() if n}
        return (
            f"{'endless' if train.size is None else train.size} to train on, {len(self.heldout)} held out; "
            f"dropped: {', '.join(f'{n} {reason}' for reason, n in lost.items()) or 'none'}"
        )

    def rewards(self) -> str:
        if not self.cfg.generates:
            return "none in this stage"
        text, note = check_rewards(self.cfg, self.heldout)
        self.notes += [note] if note else []
        return text


QUICK = ("settings", "model", "memory", "cluster", "token", "folder", "object_store")
ALL = (*QUICK, "weights", "data", "rewards")


def quick(cfg: Config, run_dir: Path) -> list[str]:
    """The checks made at every start; returns notes. Raises the first error: PreflightError, ModelError ..."""
    checks = Preflight(cfg, run_dir)
    for name in QUICK:
        getattr(checks, name)()
    return checks.notes


def report(cfg: Config, run_dir: Path) -> int:
    """`preflight=true`: all checks as a table, live on a terminal and line by line elsewhere. 0, or 1 after the first
    that fails."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from transformers.utils.logging import disable_progress_bar

    console = Console(soft_wrap=True, highlight=False)
    table = Table(title=f"Preflight of {cfg.experiment}", title_justify="left")
    for column in ("check", "", "seen"):
        table.add_column(column, overflow="fold")
    disable_progress_bar()
    checks, failure = Preflight(cfg, run_dir), ""

    def row(name: str, verdict: str, text: str) -> None:
        table.add_row(
            name, verdict, text, style={"FAIL": "bold red", "note": "yellow"}.get(verdict)
        )
        if not console.is_terminal:
            console.print(f"{name:14}{verdict:6}{text}", markup=False)

    with Live(table, console=console) if console.is_terminal else nullcontext():
        for name in ALL:
            told = len(checks.notes)
            try:
                seen = getattr(checks, name)()
            except Exception as error:  # noqa: BLE001 - whatever is wrong, this is where it is told
                failure = str(error).strip() or type(error).__name__
                row(name.replace("_", " "), "FAIL", failure)
                break
            notes = checks.notes[told:]
            row(name.replace("_", " "), "note" if notes else "ok", "; ".join([seen, *notes]))
    print(
        f"volley: error: {failure}" if failure else "volley: ready to run",
        flush=True,
        file=sys.stderr if failure else sys.stdout,
    )
    return int(bool(failure))


# ---- what the checks are made of ---------------------------------------------------------------------------------


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be used: of the machine, or of this process's control group where that allows less."""
    free = psutil.virtual_memory().available
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (root / limit).read_text().strip(), int((root / used).read_text())
        except OSError:  # no such version of control groups here
            continue
        if most != "max":
            free = min(free, int(most) - now)
    return max(0, free)


def reach(address: str, timeout_s: float) -> str:
    """Connect to HOST:PORT (or ray://HOST:PORT) and hang up. Raises PreflightError."""
    if address == "auto":
        return "RAY_ADDRESS=auto: the one that Ray finds on this machine"
    found = re.fullmatch(r"(?:ray://)?(\[[^\]]+\]|[^:/\s]+):(\d{1,5})", address)
    if not found:
        raise PreflightError(
            f"cluster.address={address}: expected auto, local, HOST:PORT or ray://HOST:PORT."
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout_s).close()
    except (OSError, OverflowError) as error:
        raise PreflightError(
            f"cluster.address={address}: no answer within {timeout_s:g} s: {error}. Is the head node "
            "running (`ray status` there), and its port open to this machine?"
        ) from error
    return f"{address} answers"


def right_answer(prompt: Prompt) -> str | None:
    """An answer known to be right; None where the data set only holds a way to check one."""
    return prompt.gold if prompt.task in ("math", "reasoning_gym") else None


def check_rewards(cfg: Config, prompts: list[Prompt]) -> tuple[str, str]:
    """`probe_rewards`, whose errors are notes where training reads given answers and rewards only measure."""
    try:
        return probe_rewards(cfg, prompts)
    except PreflightError as error:
        if cfg.algorithm.data not in ("dataset", "pairs"):
            raise
        return "only measured in evaluations", str(error)


def probe_rewards(cfg: Config, prompts: list[Prompt]) -> tuple[str, str]:
    """(what was seen, note or "") of the configured rules on right answers of a few prompts and on a wrong one.

    Scored as in training, by a killable worker. Raises PreflightError where statuses would stop the run, where no right
    answer is judged right, or where the wrong one is."""
    from reward_service.combine import rule_weights
    from reward_service.processes import RewardPool
    from reward_service.rules.item import RewardItem

    reward = {
        "rules": rule_weights(cfg.reward.rules, cfg.reward.models),
        "combine": cfg.reward.combine,
        "timeout_s": cfg.reward.timeout_s,
        "options": {"max_tokens": cfg.rollout.max_tokens, **cfg.reward.options},
    }

    def item(name: str, p: Prompt, answer: str) -> RewardItem:
        opening = "" if "<think>" in p.prefill else "<think>"
        return RewardItem(
            name,
            f"{p.prefill}{opening}so</think><answer>{answer}</answer>",
            p.gold,
            p.text,
            p.task,
            p.data_source,
            1,
            cfg.rollout.max_tokens,
            False,
            dict(p.extra),
        )

    known = [(p, right_answer(p)) for p in prompts[:PROBES]]
    right = [
        item(f"right/{i}", p, answer) for i, (p, answer) in enumerate(known) if answer is not None
    ]
    pool = RewardPool(reward, 1)
    try:
        *results, wrong = pool.score([*right, item("wrong", prompts[0], WRONG)])
    finally:
        pool.close()
    bad = [r for r in [*results, wrong] if r.status != "ok"]
    share = len(bad) / (len(results) + 1)
    if share > cfg.reward.max_failure_share:
        raise PreflightError(
            f"{len(bad)} of {len(results) + 1} rewards of known answers are not ok, more than "
            f"reward.max_failure_share={cfg.reward.max_failure_share:g}. The first: {bad[0].status}, "
            f"{bad[0].reason}. Mend the reward or the data."
        )
    verdicts = [r.parts["accuracy"] for r in results if "accuracy" in r.parts]
    if wrong.parts.get("accuracy", 0.0) >= 1:
        raise PreflightError(
            f"the rule accuracy calls {WRONG} a right answer to {prompts[0].question!r}, whose answer "
            f"is {prompts[0].gold!r}. Check data.answer_key and the reward."
        )
    unsure = bool(verdicts) and max(verdicts) < 1
    if unsure and prompts[0].task == "math":
        raise PreflightError(
            f"the rule accuracy calls the data set's own answer {prompts[0].gold!r} to "
            f"{prompts[0].question!r} wrong: {results[0].reason}. Check data.answer_key."
        )
    seen = (
        f"{sum(v >= 1 for v in verdicts)} of {len(verdicts)} right answers judged right; "
        f"a wrong one gets {wrong.total:g}"
    )
    note = ""
    if bad:
        note = f"{len(bad)} of {len(results) + 1} not ok, such as: {bad[0].status}, {bad[0].reason}"
    elif not right:
        note = f"no right answer is known for task {prompts[0].task}; only a wrong one was scored"
    elif unsure:  # of several puzzles reasoning-gym stores no answer that its own verifier accepts
        note = f"{prompts[0].data_source} stores no answer that its verifier accepts: {results[0].reason}"
    return seen, note


def disk_shortage(folder: Path, need: int) -> str:
    """A sentence where `folder`'s disk has less than `need` bytes free, else ""."""
    free = shutil.disk_usage(existing(folder)).free
    return (
        f"about {plan.amount(need)} are needed, {plan.amount(free)} are free in {folder}"
        if need > free
        else ""
    )


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(p for p in (folder, *folder.parents) if p.is_dir())
