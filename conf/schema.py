"""The typed configuration: every setting, its default, and what is allowed of it alone.

What settings must be together is in learner/checks.py. Imports nothing heavier than the standard library, so that a
mistake is answered in a second or two. All sizes are counts of prompts, completions ("samples") or tokens; all times
are seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

MISSING = "???"  # omegaconf's marker of a value that must be given


class ConfigError(ValueError):
    """A setting is wrong. The message names the key, its value, what was expected and what to do."""

    def __init__(self, key: str, value: Any, expected: str, cure: str = "") -> None:
        self.key = key
        cure = f" {cure}" if cure else ""
        super().__init__(f"{key}={value}: {expected}.{cure}")


@dataclass
class ModelConfig:
    """The policy. `path` is a Hugging Face directory or hub id; `init` = "random" builds it from `architecture`."""

    name: str = "tiny"
    path: str = MISSING
    init: str = "pretrained"  # pretrained | random
    tokenizer: str = ""  # empty: `path`; "character" builds the character-level one
    architecture: dict[str, Any] = field(
        default_factory=dict
    )  # LlamaConfig fields when init=random
    dtype: str = "float32"  # float32 | bfloat16
    max_length: int = 0  # context in tokens; 0: read from the model's config.json
    gguf_file: str = ""  # a GGUF file inside `path` to de-quantise first


@dataclass
class DataConfig:
    """Where prompts come from. `max_prompt_tokens` bounds a rendered prompt; longer ones are dropped and counted."""

    kind: str = "arithmetic"  # arithmetic | reasoning_gym | files | corpus
    name: str = ""
    path: str = ""
    template: str = "r1_zero"
    terms: list[int] = field(default_factory=lambda: [2, 3, 4])
    max_number: int = 99
    size: int = (
        0  # arithmetic: that many distinct training prompts, drawn again each epoch; 0: endless
    )
    heldout_size: int = 64
    heldout_path: str = ""
    sampler: str = (
        "uniform"  # uniform | balanced: prompts of a pass rate near 0.5 first (finite data)
    )
    sampler_floor: float = 0.1  # balanced: chance left to a prompt always or never solved
    curriculum: list[int] = field(
        default_factory=list
    )  # difficulty levels in turn; empty: all from the start
    curriculum_up: float = (
        0.8  # accuracy of the last curriculum_window groups that opens the next level
    )
    curriculum_window: int = 64  # groups
    curriculum_replay: float = 0.2  # how often a prompt of a lower level is taken where it comes up
    seed: int = 0
    max_prompt_tokens: int = 512
    steps: str = (
        ""  # rule that grades the single steps of an answer (algorithm=grpo_process); empty: none
    )
    question_key: str = "question"
    answer_key: str = "answer"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class AlgorithmConfig:
    """One point of DeepSeekMath's unified view; see docs/algorithms.md."""

    name: str = "grpo"
    source: str = ""  # in words, for docs/algorithms.md: authors, arXiv number, equations
    rewards: str = ""  # in words, for docs/algorithms.md: where rewards come from
    coefficient: str = ""  # in words, for docs/algorithms.md: the factor of grad log pi
    data: str = "policy"  # policy | dataset | pairs | sft_samples
    advantage: str = "grpo"  # a registered function of learner/algorithms/advantages/
    loss: str = "ppo_clip"
    normaliser: str = "sequence_mean"  # sequence_mean | token_mean | constant
    loss_constant: float | None = None
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    beta: float = 0.0
    kl: str = "k3"  # k1 | k2 | k3 | k3_iw
    kl_placement: str = "loss"  # loss | reward | none
    std_normalise: bool = True
    group_baseline: bool = True
    entropy_coef: float = 0.0
    tis_cap: float | None = None
    mask_truncated: bool = False
    gamma: float = 1.0
    lam: float = 1.0
    critic: bool = False
    filter: str = (
        "none"  # none | skip_dead | down_weight | resample: groups whose rewards are all equal
    )
    reference_reset_every: int = 0  # steps after which the reference becomes the policy; 0: never
    exact_kl_tokens: int = (
        0  # tokens a step whose full-vocabulary KL to the reference is logged; 0: none
    )
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    rules: dict[str, float] = field(
        default_factory=dict
    )  # weight of each rule and of each of `models`
    models: dict[str, Any] = field(
        default_factory=dict
    )  # reward models by name: {orm: {path: FOLDER}}
    combine: str = "sum"  # sum | product
    timeout_s: float = 10.0  # hard deadline of one item
    workers: int = 1
    max_failure_share: float = 0.25  # more rewards than this not ok in one step stop the run
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardModelConfig:
    """Reward models: how they are served (all of reward.models), and how one is trained."""

    count: int = 1  # actors, each with every model
    threads: int = 1
    cpus: float = 0.5
    gpus: float = 0.0
    batch_tokens: int = 8192  # padded tokens of one forward pass
    timeout_s: float = 300.0  # deadline of one batch of answers
    kind: str = "outcome"  # outcome: a score an answer | process: one at the end of each of its steps (data.steps)
    head: str = "scalar"  # scalar: a linear head | implicit: beta * log pi/pi_ref of the answer (2412.01981)
    beta: float = 0.2  # head=implicit: logits per nat
    loss: str = "pointwise"  # pointwise | pairwise (Bradley-Terry)
    init: str = ""  # the model to begin with, a causal LM or a reward model; empty: model.path
    source: str = "policy"  # where labelled answers come from: policy (its samples, graded by reward.rules) | files
    path: str = ""  # source=files: Parquet or JSON lines
    heldout_path: str = (
        ""  # source=files: those never trained on; empty: heldout_share of the prompts in `path`
    )
    heldout_share: float = 0.1
    label: str = (
        "soft"  # of an annotated step: soft (share of completions that are right) | hard (any is)
    )
    prompts: int = (
        256  # source=policy: how many are sampled for one training, each rollout.group_size times
    )
    steps: int = 60  # optimizer steps of one training
    batch: int = 128  # answers (pairwise: pairs) an optimizer step
    lr: float = 2e-5
    every: int = 0  # RL: train one of reward.models (`refresh`) again every so many steps; 0: never
    refresh: str = ""  # its name
    initial: bool = False  # RL: train it before the first step too
    replay: float = 0.1  # share of training answers that are of earlier iterations (DeepSeekMath, section 4.1.4)


@dataclass
class AnnotateConfig:
    """stage=annotate: a label for each step of sampled answers (Math-Shepherd, 2312.08935)."""

    prompts: int = 128
    answers: int = 4  # a prompt
    completions: int = 8  # of each prefix
    temperature: float = 1.0  # of the answers; completions are sampled at rollout.temperature


@dataclass
class RolloutConfig:
    prompts_per_step: int = 32
    group_size: int = 8
    max_tokens: int = 64  # completion budget
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_staleness: int = 0  # 0: strict on-policy
    timeout_s: float = 600.0  # deadline of one group


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    warmup_steps: int = 0
    decay: str = "constant"  # constant | cosine
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = 1.0


@dataclass
class LearnerConfig:
    ranks: int = 1
    zero_stage: int = 0
    micro_batch_tokens: int = 8192  # padded tokens of one forward pass
    logprob_chunk_tokens: int = 2048  # rows of the [tokens, vocabulary] matrix alive at once
    updates_per_batch: int = 1  # optimizer steps each batch of rollouts is cut into
    gradient_checkpointing: bool = False
    threads: int = 0  # torch threads of a rank; 0: its share of CPUs
    restarts: int = (
        3  # of all ranks together, from the last checkpoint, within cluster.restart_window_s
    )
    timeout_s: float = 900.0
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass
class GeneratorConfig:
    count: int = 1
    max_num_seqs: int = 256
    kv_cache_gib: float = 1.0
    block_size: int = 0  # tokens of a cache block, the unit in which prompts share a prefix; 0: vLLM's (128 on a CPU)
    gpu_memory_utilization: float = 0.5
    threads: int = 0
    enforce_eager: bool = True
    weight_backend: str = "object_store"  # object_store | nccl
    bucket_mib: int = 64
    sync_tolerance: float = (
        1e-4  # largest |log-prob difference| of the probe; times |log-prob| where that is > 1
    )
    mismatch_bound: float = 1e-2  # largest mean |train - generate| log-prob difference of a step
    restarts: int = 3  # of one generator within cluster.restart_window_s
    start_timeout_s: float = 300.0
    sync_timeout_s: float = 300.0
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass
class ReferenceConfig:
    count: int = 1
    timeout_s: float = 600.0
    threads: int = 1
    cpus: float = 0.5
    gpus: float = 0.0


@dataclass
class EvaluationConfig:
    every: int = 0  # steps between evaluations; 0: only before and after
    samples: int = 64  # completions a prompt before and after
    samples_during: int = 8
    temperature: float = 1.0


@dataclass
class GuardsConfig:
    """When a running training warns (learner/evaluation/guards.py); a warning stops nothing."""

    entropy_share: float = 0.1  # entropy under this share of the first step's ...; 0: never
    entropy_accuracy: float = 0.5  # ... while a smaller share of answers than this is right
    length_factor: float = (
        3.0  # mean length grown by this factor within length_window steps; 0: never
    )
    length_window: int = 10
    clip_ratio: float = 0.5  # share of answers cut at rollout.max_tokens
    reward_gap: float = 0.1  # a reward model's mean score gains so much more than gold accuracy within ...; 0: never
    reward_window: int = 20  # ... so many steps


@dataclass
class CheckpointConfig:
    every: int = 20  # steps; 0: only at the end and on SIGTERM
    keep: int = 2  # newest that stay; 0: all
    keep_best: int = 0  # best by `metric` that stay besides
    metric: str = "eval/pass@1"  # as in metrics.jsonl; a checkpoint of a step that has no value is never among the best
    mode: str = "max"  # max | min: which values of it are better
    folder: str = ""  # of this run alone, or any address of fsspec (s3://BUCKET/RUN); empty: RUN_DIR/checkpoints


@dataclass
class ClusterConfig:
    address: str = "auto"  # auto: the cluster of RAY_ADDRESS or of `make cluster`, else a local one | local | host:port
    strategy: str = "PACK"  # Ray's, for the placement group of all actors: PACK | SPREAD | STRICT_PACK | STRICT_SPREAD
    resources: dict[str, Any] = field(
        default_factory=dict
    )  # Ray's for one actor, by role: {generator: {big: 1}}
    wait_s: float = 6.0  # for room in the cluster before the run is given up; longer where an autoscaler brings nodes
    num_cpus: int = 0  # logical CPUs of a local cluster; 0: those of the machine
    dashboard: bool = True
    object_store_mib: int = 512
    restarts: int = 3  # of any other actor within restart_window_s
    restart_window_s: float = 3600.0
    restart_backoff_s: float = (
        1.0  # before the second restart within the window; doubles with each further one
    )
    probe_timeout_s: float = (
        120.0  # a generator or reward service that answers no ping for so long is replaced
    )


@dataclass
class LoggingConfig:
    wandb: str = "offline"  # offline | online | disabled
    wandb_project: str = "volley"
    ray_metrics: bool = True
    progress: str = "auto"  # auto | live | plain | off
    rollouts: int = 64  # completions a step written to Parquet with decoded text; 0: none, -1: all
    report: bool = True


@dataclass
class StageConfig:
    """What a run does, as a value; conf/stage/NAME.yaml holds one for each entry of the table of stages."""

    name: str = "rl"  # key of the table of stages (learner/stages/table.py)
    answers: str = (
        "policy"  # where answers come from: policy (generators sample it) | files | corpus
    )
    trains: str = "policy"  # what is optimised: policy | reward_model | nothing
    evaluates: bool = True  # whether the policy is evaluated on held-out prompts before and after


@dataclass
class Config:
    """The whole run. Settings people type most stand at the top level."""

    experiment: str = "r1_zero"
    steps: int = 64
    seed: int = 0
    run_dir: str = ""
    resume: str = "never"  # never | auto (go on where checkpoints are) | folder or address of a run or a checkpoint
    preflight: bool = False  # check everything a run needs, print a table, start nothing
    allow_changes: bool = False  # resume although settings differ from those of the checkpoint
    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    annotate: AnnotateConfig = field(default_factory=AnnotateConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def generates(self) -> bool:
        """Whether generators and the reward service run."""
        return self.stage.answers == "policy"

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size


CHOICES = {
    "stage.name": ("rl", "pretrain", "reward_model", "annotate"),
    "stage.answers": ("policy", "files", "corpus"),
    "stage.trains": ("policy", "reward_model", "nothing"),
    "model.init": ("pretrained", "random"),
    "model.dtype": ("float32", "bfloat16"),
    "data.kind": ("arithmetic", "reasoning_gym", "files", "corpus"),
    "data.template": ("r1_zero", "short"),
    "algorithm.data": ("policy", "dataset", "pairs", "sft_samples"),
    "algorithm.loss": (
        "ppo_clip",
        "gspo",
        "cispo",
        "reinforce",
        "sft",
    ),  # learner/algorithms/losses.py, likewise
    "algorithm.normaliser": ("sequence_mean", "token_mean", "constant"),
    "algorithm.kl": ("k1", "k2", "k3", "k3_iw"),
    "algorithm.kl_placement": ("loss", "reward", "none"),
    "algorithm.filter": ("none", "skip_dead", "down_weight", "resample"),
    "data.sampler": ("uniform", "balanced"),
    "reward.combine": ("sum", "product"),
    "reward_model.kind": ("outcome", "process"),
    "reward_model.head": ("scalar", "implicit"),
    "reward_model.loss": ("pointwise", "pairwise"),
    "reward_model.source": ("policy", "files"),
    "reward_model.label": ("soft", "hard"),
    "learner.zero_stage": (0, 1, 2, 3),
    "optimizer.decay": ("constant", "cosine"),
    "generator.weight_backend": ("object_store", "nccl"),
    "checkpoint.mode": ("max", "min"),
    "cluster.strategy": ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    "logging.wandb": ("offline", "online", "disabled"),
    "logging.progress": ("auto", "live", "plain", "off"),
}
# (key, smallest allowed value, whether that value itself is allowed)
RANGES = (
    ("steps", 0, True),
    ("seed", 0, True),
    ("rollout.prompts_per_step", 1, True),
    ("rollout.group_size", 1, True),
    ("rollout.max_tokens", 1, True),
    ("rollout.temperature", 0, False),
    ("rollout.top_p", 0, False),
    ("rollout.top_k", 0, True),
    ("rollout.max_staleness", 0, True),
    ("rollout.timeout_s", 0, False),
    ("optimizer.lr", 0, True),
    ("optimizer.warmup_steps", 0, True),
    ("optimizer.grad_clip", 0, True),
    ("optimizer.weight_decay", 0, True),
    ("optimizer.eps", 0, False),
    ("learner.ranks", 1, True),
    ("learner.micro_batch_tokens", 1, True),
    ("learner.logprob_chunk_tokens", 1, True),
    ("learner.updates_per_batch", 1, True),
    ("learner.timeout_s", 0, False),
    ("generator.count", 1, True),
    ("generator.max_num_seqs", 1, True),
    ("generator.kv_cache_gib", 0, False),
    ("generator.block_size", 0, True),
    ("generator.bucket_mib", 1, True),
    ("generator.sync_tolerance", 0, False),
    ("generator.mismatch_bound", 0, False),
    ("generator.restarts", 0, True),
    ("learner.restarts", 0, True),
    ("cluster.restarts", 0, True),
    ("cluster.restart_window_s", 0, False),
    ("cluster.restart_backoff_s", 0, True),
    ("cluster.probe_timeout_s", 0, False),
    ("generator.sync_timeout_s", 0, False),
    ("generator.start_timeout_s", 0, False),
    ("reference.count", 1, True),
    ("reference.timeout_s", 0, False),
    ("reward.timeout_s", 0, False),
    ("reward.workers", 1, True),
    ("reward.max_failure_share", 0, True),
    ("evaluation.every", 0, True),
    ("evaluation.samples", 1, True),
    ("evaluation.samples_during", 1, True),
    ("evaluation.temperature", 0, False),
    ("data.heldout_size", 1, True),
    ("data.size", 0, True),
    ("data.sampler_floor", 0, False),
    ("data.curriculum_up", 0, False),
    ("data.curriculum_window", 1, True),
    ("data.curriculum_replay", 0, True),
    ("algorithm.reference_reset_every", 0, True),
    ("algorithm.exact_kl_tokens", 0, True),
    ("algorithm.beta", 0, True),
    ("data.max_prompt_tokens", 1, True),
    ("data.max_number", 1, True),
    ("cluster.object_store_mib", 80, True),
    ("algorithm.eps_low", 0, True),
    ("algorithm.eps_high", 0, True),
    ("cluster.wait_s", 0, False),
    ("guards.entropy_share", 0, True),
    ("guards.entropy_accuracy", 0, True),
    ("guards.length_factor", 0, True),
    ("guards.length_window", 1, True),
    ("guards.clip_ratio", 0, True),
    ("guards.reward_gap", 0, True),
    ("guards.reward_window", 2, True),
    ("checkpoint.every", 0, True),
    ("checkpoint.keep", 0, True),
    ("checkpoint.keep_best", 0, True),
    ("cluster.num_cpus", 0, True),
    ("logging.rollouts", -1, True),
    ("learner.cpus", 0, True),
    ("learner.gpus", 0, True),
    ("learner.threads", 0, True),
    ("generator.cpus", 0, True),
    ("generator.gpus", 0, True),
    ("generator.threads", 0, True),
    ("reference.cpus", 0, True),
    ("reference.gpus", 0, True),
    ("algorithm.entropy_coef", 0, True),
    ("algorithm.tis_cap", 0, False),
    ("algorithm.dual_clip", 1, False),
    ("reward_model.count", 1, True),
    ("reward_model.threads", 0, True),
    ("reward_model.cpus", 0, True),
    ("reward_model.gpus", 0, True),
    ("reward_model.batch_tokens", 1, True),
    ("reward_model.timeout_s", 0, False),
    ("reward_model.heldout_share", 0, False),
    ("reward_model.prompts", 1, True),
    ("reward_model.steps", 1, True),
    ("reward_model.batch", 1, True),
    ("reward_model.lr", 0, True),
    ("reward_model.beta", 0, False),
    ("reward_model.every", 0, True),
    ("reward_model.replay", 0, True),
    ("annotate.prompts", 1, True),
    ("annotate.answers", 1, True),
    ("annotate.completions", 1, True),
    ("annotate.temperature", 0, False),
    ("algorithm.gamma", 0, True),
    ("algorithm.lam", 0, True),
)


def get(cfg: Config, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def keys(cfg: Any = Config, prefix: str = "") -> list[str]:
    """All dotted keys of the schema, for suggestions in error messages."""
    out: list[str] = []
    cfg = cfg() if isinstance(cfg, type) else cfg
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        out += keys(value, f"{prefix}{f.name}.") if is_dataclass(value) else [prefix + f.name]
    return out


def table() -> str:
    """docs/configuration.md's table: every key, its default, and what is allowed."""
    ranges = {key: f"{'>=' if inclusive else '>'} {low}" for key, low, inclusive in RANGES}
    rows = ["| setting | default | allowed |", "| --- | --- | --- |"]
    default = Config()
    for key in keys():
        value = get(default, key)
        shown = "" if value in (MISSING, "", {}) else json.dumps(value)
        allowed = " \\| ".join(map(str, CHOICES[key])) if key in CHOICES else ranges.get(key, "")
        rows.append(f"| `{key}` | {shown} | {allowed} |")
    return "\n".join(rows) + "\n"
