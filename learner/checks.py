"""Every check of settings together that can be made before an engine starts (DESIGN invariant 10).

Imports nothing heavier than NumPy, so that a mistake is answered in a second or two.
"""

from __future__ import annotations

import json
from pathlib import Path

from conf.schema import Config, ConfigError
from conf.settings import check_each, get
from learner.algorithms.advantages import names


def context_length(cfg: Config) -> int | None:
    """Positions the model has, in tokens; None where only the hub knows (checked again when the model loads)."""
    if cfg.model.max_length:
        return cfg.model.max_length
    if cfg.model.init == "random":
        return cfg.model.architecture.get("max_position_embeddings")
    file = Path(cfg.model.path) / "config.json"
    return json.loads(file.read_text()).get("max_position_embeddings") if file.is_file() else None


def validate(cfg: Config) -> None:
    """Raise ConfigError on the first setting that cannot work. Pure but for reading the model's config.json."""
    check_each(cfg)
    if cfg.algorithm.advantage not in (known := names()):
        raise ConfigError(
            "algorithm.advantage", cfg.algorithm.advantage, f"expected one of {', '.join(known)}"
        )
    if (
        cfg.resume not in ("never", "auto")
        and "://" not in cfg.resume
        and not Path(cfg.resume).is_dir()
    ):
        raise ConfigError(
            "resume",
            cfg.resume,
            "expected one of never, auto, or the folder of a run or a checkpoint",
        )
    if cfg.checkpoint.keep_best:
        from learner.checkpoints.retention import check_best

        check_best(cfg)
    if cfg.cluster.resources:
        from cluster.placement import check

        check(cfg.cluster.resources)
    if cfg.resume == "auto" and not cfg.run_dir:
        raise ConfigError(
            "resume", cfg.resume, "needs run_dir, the folder of the run to go on with"
        )
    _check_model(cfg)
    _check_data(cfg)
    _check_batches(cfg)
    _check_reward_model(cfg)
    if cfg.stage.evaluates:
        _check_algorithm(cfg)
    if cfg.generates:
        _check_sampling(cfg)
        _check_reward(cfg)


def _check_model(cfg: Config) -> None:
    path = cfg.model.path
    if cfg.model.init == "pretrained" and path.startswith(("/", "./", "../", "~")):
        if not (Path(path).expanduser() / (cfg.model.gguf_file or "config.json")).is_file():
            raise ConfigError(
                "model.path",
                path,
                "expected a Hugging Face model directory with a config.json",
                "Give a path that exists, or a hub id.",
            )
    if cfg.stage.answers == "corpus" and cfg.data.kind != "corpus":
        raise ConfigError(
            "data.kind", cfg.data.kind, "stage=pretrain reads a corpus", "Set data=corpus."
        )
    context, need = context_length(cfg), cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    if cfg.generates and context is not None and context < need:
        raise ConfigError(
            "rollout.max_tokens",
            cfg.rollout.max_tokens,
            f"the context of {cfg.model.name} is {context} tokens, but data.max_prompt_tokens="
            f"{cfg.data.max_prompt_tokens} + rollout.max_tokens={cfg.rollout.max_tokens} = {need}",
            "Lower one of the two, or choose a model with a longer context.",
        )


def _check_data(cfg: Config) -> None:
    if cfg.data.kind == "files" and not cfg.data.path:
        raise ConfigError(
            "data.path",
            "",
            "data=files needs a file or folder of questions",
            "Set data.path, or data=FILE.",
        )
    if cfg.data.kind == "arithmetic" and not (cfg.data.terms and min(cfg.data.terms) >= 1):
        raise ConfigError(
            "data.terms",
            cfg.data.terms,
            "expected how many numbers a sum may have, such as [2,3,4]",
        )
    if cfg.data.size and cfg.data.kind != "arithmetic":
        raise ConfigError(
            "data.size",
            cfg.data.size,
            f"data.kind={cfg.data.kind} has a size of its own",
            "Leave it at 0.",
        )
    if cfg.data.sampler == "balanced" and not (cfg.data.kind == "files" or cfg.data.size):
        raise ConfigError(
            "data.sampler",
            cfg.data.sampler,
            f"prompts of data.kind={cfg.data.kind} never come again, so nothing is known of them",
            "Use data=FILE, or arithmetic with data.size.",
        )


def _check_batches(cfg: Config) -> None:
    r, lr = cfg.rollout, cfg.learner
    if r.prompts_per_step % lr.updates_per_batch:
        raise ConfigError(
            "learner.updates_per_batch",
            lr.updates_per_batch,
            f"must divide rollout.prompts_per_step={r.prompts_per_step}, so that every optimizer step "
            "trains on whole groups",
            "Use one of "
            f"{[d for d in range(1, r.prompts_per_step + 1) if r.prompts_per_step % d == 0]}.",
        )
    if cfg.samples_per_step // lr.updates_per_batch % lr.ranks:
        raise ConfigError(
            "learner.ranks",
            lr.ranks,
            f"must divide the {cfg.samples_per_step // lr.updates_per_batch} samples of an optimizer "
            f"step (rollout.prompts_per_step={r.prompts_per_step} x rollout.group_size={r.group_size} / "
            f"learner.updates_per_batch={lr.updates_per_batch})",
        )
    longest = cfg.data.max_prompt_tokens + r.max_tokens
    if cfg.generates and lr.micro_batch_tokens < longest:
        raise ConfigError(
            "learner.micro_batch_tokens",
            lr.micro_batch_tokens,
            f"one sample may have {longest} tokens (data.max_prompt_tokens + rollout.max_tokens)",
            f"Set it to {longest} or more.",
        )


def _check_algorithm(cfg: Config) -> None:
    a = cfg.algorithm
    if a.group_baseline and cfg.rollout.group_size < 2:
        raise ConfigError(
            "rollout.group_size",
            cfg.rollout.group_size,
            f"algorithm={a.name} uses the group's mean as its baseline and needs at least 2",
            "Raise rollout.group_size or choose an algorithm without a group baseline.",
        )
    if a.advantage == "process":
        _check_steps(cfg)
    if (a.advantage == "gae") != a.critic:
        raise ConfigError(
            "algorithm.critic",
            a.critic,
            f"algorithm.advantage={a.advantage} "
            f"{'needs' if a.advantage == 'gae' else 'has no use for'} a critic",
        )
    if a.beta > 0 and a.kl_placement == "none":
        raise ConfigError(
            "algorithm.beta",
            a.beta,
            "a KL coefficient above 0 has no effect with algorithm.kl_placement=none",
            "Set algorithm.beta=0, or place the KL in loss or reward.",
        )
    for key in ("reference_reset_every", "exact_kl_tokens"):
        if getattr(a, key) and not (a.beta > 0 and a.kl_placement != "none"):
            raise ConfigError(
                f"algorithm.{key}",
                getattr(a, key),
                "there is no reference with algorithm.beta=0 or algorithm.kl_placement=none",
                "Set algorithm.beta above 0, or leave this at 0.",
            )
    if a.normaliser == "constant" and not (a.loss_constant and a.loss_constant > 0):
        raise ConfigError(
            "algorithm.loss_constant",
            a.loss_constant,
            "algorithm.normaliser=constant needs a positive divisor in tokens",
            "Usually rollout.max_tokens.",
        )
    if a.loss == "ppo_clip" and a.eps_low >= 1:
        raise ConfigError(
            "algorithm.eps_low",
            a.eps_low,
            "expected less than 1 (the ratio is clipped to 1 - eps_low)",
        )


def _check_steps(cfg: Config) -> None:
    """Process supervision: each step is rewarded by a process model, or by a rule."""
    from reward_service.models.meaning import supervisor
    from reward_service.step_labels.steps import STEP_RULES

    if not supervisor(cfg) and cfg.data.steps not in STEP_RULES:
        raise ConfigError(
            "data.steps",
            cfg.data.steps,
            f"algorithm={cfg.algorithm.name} needs step rewards: a process "
            f"model among reward.models, or one of the rules {', '.join(STEP_RULES)}",
            "Use reward=prm, data=arithmetic, or algorithm=grpo.",
        )
    if supervisor(cfg) and cfg.reward.combine != "sum":
        raise ConfigError(
            "reward.combine", cfg.reward.combine, "the rewards of single steps add up", "Use sum."
        )


def _check_sampling(cfg: Config) -> None:
    r = cfg.rollout
    if r.top_p < 1 or r.top_k > 0:
        key = "rollout.top_p" if r.top_p < 1 else "rollout.top_k"
        raise ConfigError(
            key,
            get(cfg, key),
            "samples from a truncated distribution have no finite importance ratio "
            "to the policy that is trained",
            "Set rollout.top_p=1 and rollout.top_k=0.",
        )
    if cfg.generator.weight_backend == "nccl" and cfg.generator.gpus == 0:
        raise ConfigError(
            "generator.weight_backend",
            "nccl",
            "needs GPUs (generator.gpus > 0)",
            "Use generator.weight_backend=object_store.",
        )
    if cfg.generator.block_size % 32 and cfg.generator.gpus == 0:
        raise ConfigError(
            "generator.block_size",
            cfg.generator.block_size,
            "on a CPU vLLM has blocks of a multiple of 32 tokens",
            "Use 32, or 0 for vLLM's own choice.",
        )
    if r.max_staleness > 0 and cfg.algorithm.tis_cap is None and cfg.learner.updates_per_batch == 1:
        raise ConfigError(
            "rollout.max_staleness",
            r.max_staleness,
            "off-policy tokens need a correction",
            "Set algorithm.tis_cap=2 (truncated importance weights).",
        )


def _check_models(cfg: Config) -> None:
    from reward_service.models.meaning import NEW, meaning
    from reward_service.rules.registry import RULES

    for name, settings in cfg.reward.models.items():
        key = f"reward.models.{name}"
        if name in RULES or name in (cfg.reward.options.get("custom") or {}):
            raise ConfigError(key, settings, "there is a rule of this name", "Choose another.")
        if not isinstance(settings, dict) or not isinstance(settings.get("path"), str):
            raise ConfigError(
                key,
                settings,
                "expected a path: the folder or hub id of a reward model",
                f"{key}.path=outputs/RUN/model; +experiment=train_orm makes one.",
            )
        if unknown := sorted(set(settings) - {"path", "kind", "probability", "steps"}):
            raise ConfigError(
                f"{key}.{unknown[0]}",
                settings[unknown[0]],
                "unknown; known are path, kind, probability, steps",
            )
        if name not in cfg.reward.rules:
            raise ConfigError(
                key,
                settings["path"],
                "has no weight",
                f"Give one: +reward.rules.{name}=1.0 (0: only measured).",
            )
        path, rm = settings["path"], cfg.reward_model
        if path == NEW and not (rm.refresh == name and rm.initial):
            raise ConfigError(
                f"{key}.path",
                path,
                "a new model says nothing before it is trained",
                f"Set reward_model.refresh={name} and reward_model.initial=true, or give a trained one.",
            )
        local = path.startswith(("/", ".", "~", "outputs/"))
        if path != NEW and local and not (Path(path).expanduser() / "config.json").is_file():
            raise ConfigError(
                f"{key}.path",
                path,
                "expected a Hugging Face directory with a config.json",
                "Give a path that exists, or a hub id.",
            )
        how = None if path == NEW else meaning(path, settings)
        if how and how.kind == "process" and not (how.steps or cfg.data.steps):
            raise ConfigError(
                "data.steps",
                "",
                f"the process model {name} scores steps, and nothing says where they end",
                "Set data.steps, such as newline.",
            )


def _check_reward_model(cfg: Config) -> None:
    from reward_service.models.meaning import NEW, config_of, head_of

    rm, rl = cfg.reward_model, cfg.stage.evaluates
    if (rm.every or rm.initial) and not rm.refresh or (rm.refresh and not rl):
        raise ConfigError(
            "reward_model.refresh",
            rm.refresh,
            "names the model of reward.models that is trained beside "
            f"a policy (stage=rl) by reward_model.every={rm.every} or reward_model.initial={rm.initial}",
            "Name it, or leave both out.",
        )
    if rm.refresh and rm.refresh not in cfg.reward.models:
        raise ConfigError(
            "reward_model.refresh",
            rm.refresh,
            f"expected one of reward.models: {', '.join(cfg.reward.models) or 'there is none'}",
        )
    if not (rm.refresh or not cfg.stage.evaluates and cfg.stage.answers != "corpus"):
        return
    if rm.kind == "process" and rm.loss == "pairwise":
        raise ConfigError(
            "reward_model.loss", rm.loss, "a process model has labels, not pairs", "Use pointwise."
        )
    if rm.kind == "process" and rm.source == "policy":
        raise ConfigError(
            "reward_model.source",
            rm.source,
            "samples of a policy have no label for each step",
            "Annotate some (+experiment=annotate_steps), then reward_model.source=files and "
            "reward_model.path=RUN_DIR/annotations.parquet; or reward_model.kind=outcome.",
        )
    if rm.refresh and rm.source != "policy":
        raise ConfigError(
            "reward_model.source",
            rm.source,
            "a model is refreshed on samples of the policy",
            "Use reward_model.source=policy.",
        )
    served = cfg.reward.models.get(rm.refresh, {}).get("path", NEW)
    began = rm.init if served == NEW else served
    had, beta = head_of(config_of(began)) if began else ("", 0.0)
    if had and (had, beta or rm.beta) != (rm.head, rm.beta):
        raise ConfigError(
            "reward_model.head",
            rm.head,
            f"{began} is trained further, whose head is {had}"
            + (f" with beta={beta}, not reward_model.beta={rm.beta}" if beta else ""),
            "Set both as it has them.",
        )
    for key in ("path", "heldout_path") if rm.source == "files" else ():
        value = getattr(rm, key)
        if (key == "path" and not value) or (value and not Path(value).expanduser().exists()):
            raise ConfigError(
                f"reward_model.{key}",
                value,
                "expected a file or folder of labelled answers (Parquet or "
                "JSON lines; docs/rewards.md)",
            )
    if cfg.stage.trains == "nothing" and not cfg.data.steps:
        raise ConfigError(
            "data.steps",
            "",
            "stage=annotate labels steps, and nothing says where they end",
            "Set it, such as newline.",
        )
    if rm.source == "policy" and not rl and "accuracy" not in cfg.reward.rules:
        raise ConfigError(
            "reward.rules",
            cfg.reward.rules,
            "samples are labelled by the rule accuracy",
            "Name it among them.",
        )


def _check_reward(cfg: Config) -> None:
    from reward_service.step_labels.steps import splitter

    if cfg.data.steps:
        try:
            splitter(cfg.data.steps)
        except ValueError as error:
            raise ConfigError(
                "data.steps", cfg.data.steps, str(error).partition(": ")[2] + ", or nothing"
            ) from error
    if cfg.algorithm.options.get("overlong_share") and "soft_overlong" in cfg.reward.rules:
        raise ConfigError(
            "reward.rules.soft_overlong",
            cfg.reward.rules["soft_overlong"],
            "algorithm.options.overlong_share already takes off the same penalty",
            "Use one of the two.",
        )
    if not cfg.reward.rules:
        raise ConfigError(
            "reward.rules", cfg.reward.rules, "expected at least one rule with a weight"
        )
    from reward_service.rules.registry import RULES  # as light as this module

    known = sorted({*RULES, *(cfg.reward.options.get("custom") or {}), *cfg.reward.models})
    unknown = [name for name in cfg.reward.rules if name not in known]
    if unknown:
        raise ConfigError(
            f"reward.rules.{unknown[0]}",
            cfg.reward.rules[unknown[0]],
            f"unknown rule, expected one of {', '.join(known)}",
        )
    if not any(cfg.reward.rules.values()):
        raise ConfigError(
            "reward.rules", cfg.reward.rules, "every weight is 0: nothing is rewarded"
        )
    _check_models(cfg)
