"""The checks of what a run needs. Estimates are in cluster/plan.py."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

from actors.data.build import build_dataset
from actors.modeling.loading import ModelError, load_model, load_tokenizer, model_size
from cluster import plan, security
from cluster.connect import target
from conf.schema import Config
from learner.algorithms import parts
from learner.preflight.machine import PreflightError, existing, free_memory, reach
from learner.preflight.rewards import check_rewards
from reward_service.models.meaning import NEW, meaning

REACH_S = 10.0  # for a TCP connection to a running cluster


class Preflight:
    """The checks of one configuration, in the order they are made.

    Each returns what it saw, and raises an error that says what to do. `notes` gathers what is no
    obstacle but worth knowing.
    """

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg, self.run_dir, self.notes = cfg, run_dir, []
        self.local = not target(cfg)

    def settings(self) -> str:
        """Batch arithmetic, and whether the parts of the algorithm fit together."""
        cfg, r = self.cfg, self.cfg.rollout
        if not cfg.stage.evaluates:
            return f"stage={cfg.stage.name}, {cfg.steps} steps"
        parts.check(cfg.algorithm)
        each = cfg.samples_per_step // cfg.learner.updates_per_batch
        return (
            f"{r.prompts_per_step} prompts x {r.group_size} answers = "
            f"{cfg.samples_per_step} samples a step; "
            f"optimizer steps: {cfg.learner.updates_per_batch} of {each}, "
            f"{each // cfg.learner.ranks} a rank"
        )

    def model(self) -> str:
        """The model's size, and whether its tokenizer fits it."""
        self.tokenizer = load_tokenizer(self.cfg.model)
        self.size = model_size(self.cfg.model)
        rows = self.size.vocabulary
        if rows and len(self.tokenizer) > rows:
            self.notes.append(
                f"model.tokenizer={self.cfg.model.tokenizer or self.cfg.model.path}: has "
                f"{len(self.tokenizer)} tokens, the model embeds {rows}: a text with one of "
                "the others stops the run"
            )
        return (
            f"{self.cfg.model.name}: {self.size.parameters:,} parameters, "
            f"{len(self.tokenizer)} tokens"
        )

    def memory(self) -> str:
        """Memory on paper (cluster/plan.py) against what the machine has left."""
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
                "learner.zero_stage, or use model.dtype=bfloat16, smaller models or a larger "
                "machine."
            )
        if total + sum(more.values()) > free:
            self.notes.append(
                f"memory may run out in a training step: about {plan.show(more)} on top of {text}. "
                "Lower learner.micro_batch_tokens, or set learner.gradient_checkpointing=true."
            )
        return text

    def reward_models(self) -> dict[str, plan.ModelSize]:
        """Sizes of the reward models that are served, by name.

        Raises ModelError naming reward.models.NAME.path.
        """
        sizes = {}
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
                sizes[name] = replace(size, frozen=size.parameters if head == "implicit" else 0)
            except ModelError as error:
                raise ModelError(
                    str(error).replace("model.path", f"reward.models.{name}.path", 1)
                ) from error
        return sizes

    def cluster(self) -> str:
        """Whether the cluster's address answers, or a local one can open ports."""
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
        """Where Ray's token comes from."""
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
        """Whether the run's folder can be written, and has room."""
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
        """Whether the folder that setting `key` names can be written and has `need` bytes free."""
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
                f"{key}={folder}: what the run leaves there needs about {text} "
                f"(checkpoint.keep={self.cfg.checkpoint.keep}). Free some, "
                "lower checkpoint.keep, or choose a larger disk."
            )
        return text

    def object_store(self) -> str:
        """Whether /dev/shm has room for the object store."""
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
                f"two versions of the weights ({plan.amount(2 * weights)}) do not fit into "
                f"cluster.object_store_mib={self.cfg.cluster.object_store_mib}: Ray will use "
                "the disk, slowly."
            )
        return f"{plan.amount(need)} of {plan.amount(free)} free in /dev/shm"

    # ---- only with preflight=true, because it takes longer ---------------------------------------

    def weights(self) -> str:
        """Load the model, and see that every value is finite."""
        model = load_model(self.cfg.model, self.cfg.seed)
        bad = next((n for n, p in model.named_parameters() if not bool(p.isfinite().all())), None)
        if bad:
            raise PreflightError(
                f"model.path={self.cfg.model.path}: {bad} holds values that are not finite. Use "
                "another copy of the model."
            )
        return f"loaded {type(model).__name__}, every value finite"

    def data(self) -> str:
        """Build both data sets."""
        data = self.cfg.data
        if data.kind == "corpus":
            return "made as it is read"

        def count(text: str) -> int:
            return len(self.tokenizer(text)["input_ids"])

        train, heldout = (build_dataset(data, split, count) for split in ("train", "heldout"))
        self.heldout = heldout.prompts()[: data.heldout_size]
        lost = {reason: n for reason, n in train.dropped.items() if n}
        return (
            f"{'endless' if train.size is None else train.size} to train on, "
            f"{len(self.heldout)} held out; "
            f"dropped: {', '.join(f'{n} {reason}' for reason, n in lost.items()) or 'none'}"
        )

    def rewards(self) -> str:
        """Score known answers by the configured rules."""
        if not self.cfg.generates:
            return "none in this stage"
        text, note = check_rewards(self.cfg, self.heldout)
        self.notes += [note] if note else []
        return text
