"""Settings of what runs the training: actors, cluster, checkpoints, evaluation, logging.

conf/schema.py puts all sections together; conf/task.py holds those of what is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conf.field import setting


@dataclass
class LearnerConfig:
    """The learner: DeepSpeed ranks that hold the policy and train it."""

    ranks: int = setting(1, "Number of ranks, each an actor.", low=1)
    zero_stage: int = setting(
        0,
        "ZeRO stage: what is divided among the ranks (nothing; optimizer states; gradients too; "
        "weights too).",
        choices=(0, 1, 2, 3),
    )
    micro_batch_tokens: int = setting(8192, "Padded tokens of one forward pass, at most.", low=1)
    logprob_chunk_tokens: int = setting(
        2048, "Rows of the [tokens, vocabulary] matrix that are in memory at once.", low=1
    )
    updates_per_batch: int = setting(
        1, "Number of optimizer steps that the samples of a training step are divided into.", low=1
    )
    gradient_checkpointing: bool = setting(
        False, "Whether activations are recomputed in the backward pass to save memory."
    )
    threads: int = setting(0, "Torch threads of a rank; 0: its share of CPUs.", low=0)
    restarts: int = setting(
        3,
        "How often within cluster.restart_window_s all ranks are replaced and go on from the last "
        "checkpoint, before the run fails.",
        low=0,
    )
    timeout_s: float = setting(900.0, "Seconds within which a call to the ranks must end.", above=0)
    cpus: float = setting(1.0, "CPUs that a rank reserves.", low=0)
    gpus: float = setting(0.0, "GPUs that a rank reserves.", low=0)


@dataclass
class GeneratorConfig:
    """The generators: vLLM engines that sample completions from the newest weights."""

    count: int = setting(1, "Number of generators, each an actor.", low=1)
    max_num_seqs: int = setting(256, "Sequences that an engine decodes at once, at most.", low=1)
    kv_cache_gib: float = setting(1.0, "Size of the key-value cache in GiB, on a CPU.", above=0)
    block_size: int = setting(
        0,
        "Tokens of a cache block, the unit in which prompts share a prefix; 0: vLLM's choice (128 "
        "on a CPU).",
        low=0,
    )
    gpu_memory_utilization: float = setting(
        0.5, "Share of a GPU's memory that vLLM uses.", above=0, high=1
    )
    threads: int = setting(0, "Threads of a generator; 0: its share of CPUs.", low=0)
    enforce_eager: bool = setting(True, "Whether vLLM runs without CUDA graphs and compilation.")
    weight_backend: str = setting(
        "object_store",
        "How new weights reach the generators: Ray's object store, or NCCL between GPUs.",
        choices=("object_store", "nccl"),
    )
    bucket_mib: int = setting(64, "Size in MiB of the parts in which weights are sent.", low=1)
    sync_tolerance: float = setting(
        1e-4,
        "Largest difference between learner and generator in the log-probs of a probe after a "
        "weight update; multiplied by the log-prob where that is larger than 1.",
        above=0,
    )
    mismatch_bound: float = setting(
        1e-2,
        "Largest mean difference between the learner's and the generators' log-probs in a step.",
        above=0,
    )
    restarts: int = setting(
        3,
        "How often one generator is replaced within cluster.restart_window_s before the run fails.",
        low=0,
    )
    start_timeout_s: float = setting(
        300.0, "Seconds within which a generator must have started.", above=0
    )
    sync_timeout_s: float = setting(
        300.0, "Seconds within which a generator must have loaded new weights.", above=0
    )
    cpus: float = setting(1.0, "CPUs that a generator reserves.", low=0)
    gpus: float = setting(0.0, "GPUs that a generator reserves.", low=0)


@dataclass
class ReferenceConfig:
    """The reference model, which the KL divergence is measured to."""

    count: int = setting(1, "Number of actors that hold the reference model.", low=1)
    timeout_s: float = setting(600.0, "Seconds within which a batch must be scored.", above=0)
    threads: int = setting(1, "Torch threads of an actor; 0: its share of CPUs.", low=0)
    cpus: float = setting(0.5, "CPUs that an actor reserves.", low=0)
    gpus: float = setting(0.0, "GPUs that an actor reserves.", low=0)


@dataclass
class EvaluationConfig:
    """Evaluation on the held-out prompts."""

    every: int = setting(
        0, "Number of steps between evaluations; 0: only before and after training.", low=0
    )
    samples: int = setting(64, "Completions per prompt before and after training.", low=1)
    samples_during: int = setting(8, "Completions per prompt in evaluations between.", low=1)
    temperature: float = setting(1.0, "Sampling temperature of evaluations.", above=0)


@dataclass
class GuardsConfig:
    """When a run warns (learner/evaluation/guards.py). A warning stops nothing."""

    entropy_share: float = setting(
        0.1,
        "Warn when entropy falls below this share of the first step's, while accuracy is below "
        "`entropy_accuracy`; 0: never.",
        low=0,
    )
    entropy_accuracy: float = setting(
        0.5, "Share of right answers from which low entropy is no reason to warn.", low=0
    )
    length_factor: float = setting(
        3.0,
        "Warn when the mean length grows by this factor within `length_window` steps; 0: never.",
        low=0,
    )
    length_window: int = setting(10, "Number of steps over which growth is measured.", low=1)
    clip_ratio: float = setting(
        0.5, "Warn when more than this share of answers is cut at rollout.max_tokens.", low=0
    )
    reward_gap: float = setting(
        0.1,
        "Warn when a reward model's mean score has gained this much more than gold accuracy within "
        "`reward_window` steps; 0: never.",
        low=0,
    )
    reward_window: int = setting(20, "Number of steps over which both gains are measured.", low=2)


@dataclass
class CheckpointConfig:
    """When the state of a run is saved, where, and which checkpoints are kept."""

    every: int = setting(
        20, "Number of steps between checkpoints; 0: only at the end and on SIGTERM.", low=0
    )
    keep: int = setting(2, "Number of newest checkpoints that are kept; 0: all.", low=0)
    keep_best: int = setting(
        0, "Number of best checkpoints by `metric` that are kept in addition.", low=0
    )
    metric: str = setting(
        "eval/pass@1",
        "Metric of metrics.jsonl that ranks checkpoints; one without a value at its step is never "
        "among the best.",
    )
    mode: str = setting(
        "max", "Whether high or low values of `metric` are better.", choices=("max", "min")
    )
    folder: str = setting(
        "",
        "Folder for the checkpoints of this run alone, or any address of fsspec such as "
        "s3://BUCKET/RUN; empty: RUN_DIR/checkpoints.",
    )


@dataclass
class ClusterConfig:
    """The Ray cluster that the run uses."""

    address: str = setting(
        "auto",
        "auto: the cluster of RAY_ADDRESS or `make cluster`, else a local one; local: always a "
        "local one; or HOST:PORT.",
    )
    strategy: str = setting(
        "PACK",
        "How Ray's placement group spreads the actors over nodes.",
        choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    )
    resources: dict[str, Any] = setting(
        {}, "Custom Ray resources that one actor of a role reserves: {generator: {big: 1}}."
    )
    wait_s: float = setting(
        6.0,
        "Seconds to wait for room in the cluster; more where an autoscaler adds nodes.",
        above=0,
    )
    num_cpus: int = setting(
        0, "Logical CPUs of a local cluster; 0: as many as the machine has.", low=0
    )
    dashboard: bool = setting(True, "Whether a local cluster starts Ray's dashboard.")
    object_store_mib: int = setting(512, "Object store of a local cluster in MiB.", low=80)
    restarts: int = setting(
        3,
        "How often any other actor is replaced within `restart_window_s` before the run fails.",
        low=0,
    )
    restart_window_s: float = setting(
        3600.0, "Seconds over which replacements are counted.", above=0
    )
    restart_backoff_s: float = setting(
        1.0,
        "Seconds before the second replacement within the window; doubled for each further one.",
        low=0,
    )
    probe_timeout_s: float = setting(
        120.0,
        "A generator or reward service that answers no ping for so many seconds is replaced.",
        above=0,
    )


@dataclass
class LoggingConfig:
    """Where metrics and samples are written."""

    wandb: str = setting(
        "offline", "Mode of Weights & Biases.", choices=("offline", "online", "disabled")
    )
    wandb_project: str = setting("volley", "Project at Weights & Biases.")
    ray_metrics: bool = setting(True, "Whether metrics are exported as Ray gauges (Prometheus).")
    progress: str = setting(
        "auto",
        "Progress in the terminal: a live table, plain lines, none, or auto: live in a terminal.",
        choices=("auto", "live", "plain", "off"),
    )
    rollouts: int = setting(
        64,
        "Completions per step that are written to Parquet with their text; 0: none, -1: all.",
        low=-1,
    )
    report: bool = setting(True, "Whether report.html is written.")
