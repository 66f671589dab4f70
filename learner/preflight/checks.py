"""The checks of what a run needs, each a method. The estimates are in cluster/plan.py."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.data.build import build_dataset
from actors.data.prompt import Prompt
from actors.modeling.loading import ModelError, load_model, load_tokenizer, model_size
from cluster import plan, security
from cluster.connect import target
from cluster.roster import count
from conf.schema import Config
from learner.algorithms import parts
from learner.preflight.machine import PreflightError, existing, free_memory, reach
from learner.preflight.rewards import check_rewards
from reward_service.models.meaning import NEW, meaning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REACH_S = 10.0  # for a TCP connection to a running cluster


class Preflight:
    """The checks of one configuration, in the order in which they are made.

    Each check returns what it has seen, for the table, or raises an error that says what to do.
    Later checks use what `model` and `data` have read.

    notes: what prevents nothing but is worth knowing, over all checks made so far.
    local: whether the run starts a cluster of its own.
    tokenizer, size: of the policy; set by `model`.
    heldout: the first data.heldout_size held-out prompts; set by `data`.
    """

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg, self.run_dir = cfg, run_dir
        self.notes: list[str] = []
        self.local = not target(cfg)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.size = plan.ModelSize(0)
        self.heldout: list[Prompt] = []

    def settings(self) -> str:
        """Check that the parts of the algorithm fit together; show the sizes of a batch."""
        cfg, r = self.cfg, self.cfg.rollout
        if not cfg.stage.evaluates:
            return f"stage={cfg.stage.name}, {cfg.steps} steps"
        parts.check(cfg.algorithm)
        per_update = cfg.samples_per_step // cfg.learner.updates_per_batch
        return (
            f"{r.prompts_per_step} prompts x {r.group_size} answers = "
            f"{cfg.samples_per_step} samples a step; "
            f"optimizer steps: {cfg.learner.updates_per_batch} of {per_update}, "
            f"{per_update // cfg.learner.ranks} a rank"
        )

    def model(self) -> str:
        """Read the model's tokenizer and size, and compare the two vocabularies."""
        self.tokenizer = load_tokenizer(self.cfg.model)
        self.size = model_size(self.cfg.model)
        embedded = self.size.vocabulary  # 0 if the model's config does not say
        if embedded and len(self.tokenizer) > embedded:
            self.notes.append(
                f"model.tokenizer={self.cfg.model.tokenizer or self.cfg.model.path}: has "
                f"{len(self.tokenizer)} tokens, the model embeds {embedded}: a text with one of "
                "the others stops the run"
            )
        return (
            f"{self.cfg.model.name}: {self.size.parameters:,} parameters, "
            f"{len(self.tokenizer)} tokens"
        )

    def memory(self) -> str:
        """Compare the estimate of the memory (cluster/plan.py) with what the machine has free."""
        if not self.local:
            return "on a running cluster: not estimated"
        resident = plan.memory(self.cfg, self.size, self.reward_models())
        passing = plan.passing(self.cfg, self.size)
        total, free = sum(resident.values()), free_memory()
        text = f"{plan.show(resident)} of {plan.amount(free)} free"
        if total > free:
            raise PreflightError(
                f"memory: needs about {text}. Lower generator.kv_cache_gib, generator.count, "
                "cluster.object_store_mib, reward_model.count or reward.workers, raise "
                "learner.zero_stage, or use model.dtype=bfloat16, smaller models or a larger "
                "machine."
            )
        if total + sum(passing.values()) > free:
            self.notes.append(
                f"memory may run out in a training step: about {plan.show(passing)} on top of "
                f"{text}. Lower learner.micro_batch_tokens, or set "
                "learner.gradient_checkpointing=true."
            )
        return text

    def reward_models(self) -> dict[str, plan.ModelSize]:
        """Return the sizes of the reward models that are served, by name.

        Raises ModelError, which names the setting reward.models.NAME.path.
        """
        if not count(self.cfg, "reward_model"):
            return {}
        return {name: self.reward_model(name) for name in self.cfg.reward.models}

    def reward_model(self, name: str) -> plan.ModelSize:
        """Return the size of one of the served reward models. A new one begins as the policy.

        An implicit reward model also holds its frozen reference. Raises ModelError.
        """
        settings = self.cfg.reward.models[name]
        if settings["path"] == NEW:
            head, size = self.cfg.reward_model.head, self.size
        else:
            head = meaning(settings["path"], settings).head
            model = replace(self.cfg.model, path=settings["path"], init="pretrained", gguf_file="")
            try:
                size = model_size(model)
            except ModelError as error:
                message = str(error).replace("model.path", f"reward.models.{name}.path", 1)
                raise ModelError(message) from error
        return replace(size, frozen=size.parameters if head == "implicit" else 0)

    def cluster(self) -> str:
        """Check that the named cluster answers, or that a local one can open ports."""
        if not self.local:
            return reach(target(self.cfg), REACH_S)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 0))
            except OSError as error:
                raise PreflightError(
                    f"cluster.address={self.cfg.cluster.address}: no port of 127.0.0.1 can be "
                    f"opened: {error}. Bring the loopback interface up."
                ) from error
        return "a local one; ports of the loopback can be opened"

    def token(self) -> str:
        """Check that there is, or will be, a token if Ray asks for one."""
        source = security.token_source()
        mode = os.environ.get("RAY_AUTH_MODE", "token" if self.local else "")
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
        """Check that the folders of the run and of its checkpoints can be written and have room."""
        model, everything = plan.published(self.cfg, self.size), plan.disk(self.cfg, self.size)
        checkpoints = self.cfg.checkpoint.folder
        if not checkpoints:  # they are in the run's folder
            return self.has_room("run_dir", self.run_dir, everything)
        text = self.has_room("run_dir", self.run_dir, model)
        if "://" in checkpoints:
            return f"{text}; {checkpoints} is tried when the run starts"
        folder = Path(checkpoints).absolute()
        return f"{text}; {self.has_room('checkpoint.folder', folder, everything - model)}"

    def has_room(self, key: str, folder: Path, need: int) -> str:
        """Check that the folder of the setting `key` can be written and has `need` bytes free.

        The folder need not exist yet; then the nearest folder above it is checked.
        """
        parent = existing(folder)
        try:
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            raise PreflightError(
                f"{key}={folder}: nothing can be written in {parent}: {error}"
            ) from error
        free = shutil.disk_usage(parent).free
        text = f"{plan.amount(need)} of {plan.amount(free)} free in {parent}"
        if need > free:
            raise PreflightError(
                f"{key}={folder}: what the run leaves there needs about {text} "
                f"(checkpoint.keep={self.cfg.checkpoint.keep}). Free some, "
                "lower checkpoint.keep, or choose a larger disk."
            )
        return text

    def object_store(self) -> str:
        """Check that /dev/shm has room for the object store of a local cluster."""
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
        if 2 * weights > need:  # a version stays until the next one is loaded
            self.notes.append(
                f"two versions of the weights ({plan.amount(2 * weights)}) do not fit into "
                f"cluster.object_store_mib={self.cfg.cluster.object_store_mib}: Ray will use "
                "the disk, slowly."
            )
        return f"{plan.amount(need)} of {plan.amount(free)} free in /dev/shm"

    # ---- only with preflight=true, because it takes longer ---------------------------------------

    def weights(self) -> str:
        """Load the model and check that every value is finite."""
        model = load_model(self.cfg.model, self.cfg.seed)
        for name, parameter in model.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise PreflightError(
                    f"model.path={self.cfg.model.path}: {name} holds values that are not finite. "
                    "Use another copy of the model."
                )
        return f"loaded {type(model).__name__}, every value finite"

    def data(self) -> str:
        """Read the training and held-out prompts."""
        data = self.cfg.data
        if data.kind == "corpus":
            return "made as it is read"

        def count_tokens(text: str) -> int:
            return len(self.tokenizer(text)["input_ids"])

        train = build_dataset(data, "train", count_tokens)
        heldout = build_dataset(data, "heldout", count_tokens)
        self.heldout = heldout.prompts()[: data.heldout_size]
        dropped = ", ".join(f"{n} {reason}" for reason, n in train.dropped.items() if n)
        return (
            f"{'endless' if train.size is None else train.size} to train on, "
            f"{len(self.heldout)} held out; dropped: {dropped or 'none'}"
        )

    def rewards(self) -> str:
        """Check that the configured rules accept answers known to be right, and no wrong one."""
        if not self.cfg.generates:
            return "none in this stage"
        text, note = check_rewards(self.cfg, self.heldout)
        if note:
            self.notes.append(note)
        return text
