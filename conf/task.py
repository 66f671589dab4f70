"""Settings of what is learned: model, data, algorithm, rewards, sampling, optimizer.

conf/schema.py puts all sections together; conf/system.py holds those of the machinery.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conf.field import MISSING, setting


@dataclass
class StageConfig:
    """What a run does; conf/stage/NAME.yaml holds one for each stage of learner/stages/table.py."""

    name: str = setting(
        "rl", "Name of the stage.", choices=("rl", "pretrain", "reward_model", "annotate")
    )
    answers: str = setting(
        "policy",
        "Where answers come from: generators sample them from the policy, files, or a corpus.",
        choices=("policy", "files", "corpus"),
    )
    trains: str = setting(
        "policy", "What is trained.", choices=("policy", "reward_model", "nothing")
    )
    evaluates: bool = setting(
        True, "Whether the policy is evaluated on held-out prompts before and after the stage."
    )


@dataclass
class ModelConfig:
    """The policy: a model that exists, or one with random weights."""

    name: str = setting("tiny", "Name of the model in reports and messages.")
    path: str = setting(
        MISSING,
        "Hugging Face model directory or hub id. `embedded:NAME` is a model of this project, "
        "`package:NAME` the folder of an installed Python package.",
    )
    init: str = setting(
        "pretrained",
        "Whether the weights are loaded from `path` or drawn at random for `architecture`.",
        choices=("pretrained", "random"),
    )
    tokenizer: str = setting(
        "",
        "Directory or hub id of the tokenizer; `character` builds the character-level one. "
        "Empty: that of `path`.",
    )
    architecture: dict[str, Any] = setting(
        {}, "Fields of Hugging Face's LlamaConfig, for init=random."
    )
    dtype: str = setting(
        "float32", "Number format of the weights.", choices=("float32", "bfloat16")
    )
    max_length: int = setting(
        0, "Context of the model in tokens; 0: as its config.json says.", low=0
    )
    gguf_file: str = setting("", "A GGUF file inside `path` whose weights are de-quantised first.")


@dataclass
class DataConfig:
    """Where prompts come from, and in which order they are drawn."""

    kind: str = setting(
        "arithmetic",
        "Source of the prompts: generated sums, a data set of reasoning-gym, files, or the "
        "synthetic text corpus for pre-training.",
        choices=("arithmetic", "reasoning_gym", "files", "corpus"),
    )
    name: str = setting("", "Name of the reasoning-gym data set.")
    path: str = setting("", "File or folder of questions, for kind=files.")
    template: str = setting(
        "r1_zero",
        "Text around a question: R1-Zero's conversation, a short one, or the question alone.",
        choices=("r1_zero", "short", "none"),
    )
    terms: list[int] = setting(
        [2, 3, 4], "How many numbers a sum may have, for kind=arithmetic; drawn uniformly."
    )
    max_number: int = setting(99, "Largest number in a sum, for kind=arithmetic.", low=1)
    size: int = setting(
        0,
        "Number of distinct training prompts, repeated each epoch, for kind=arithmetic; 0: no end.",
        low=0,
    )
    heldout_size: int = setting(64, "Number of held-out prompts for evaluation.", low=1)
    heldout_path: str = setting(
        "", "File of held-out questions, for kind=files; empty: rows of `path` are held out."
    )
    sampler: str = setting(
        "uniform",
        "Order of prompts: that of the data set, or preferring prompts with a pass rate near 0.5.",
        choices=("uniform", "balanced"),
    )
    sampler_floor: float = setting(
        0.1,
        "Probability of accepting a prompt that is always or never solved, for sampler=balanced.",
        above=0,
        high=1,
    )
    curriculum: list[int] = setting(
        [], "Difficulty levels in the order in which they open; empty: all from the start."
    )
    curriculum_up: float = setting(
        0.8,
        "Mean accuracy of the last `curriculum_window` groups at which the next level opens.",
        above=0,
        high=1,
    )
    curriculum_window: int = setting(
        64, "Number of groups over which the curriculum measures accuracy.", low=1
    )
    curriculum_replay: float = setting(
        0.2, "Probability of accepting a prompt of a level below the current one.", low=0, high=1
    )
    seed: int = setting(0, "Seed of the data: which prompts exist and which are held out.")
    max_prompt_tokens: int = setting(
        512, "Longest rendered prompt in tokens; longer ones are dropped and counted.", low=1
    )
    steps: str = setting(
        "",
        "Where a step of an answer ends: newline, running_sum (which also grades each step) or "
        "separator:TEXT. Empty: answers have no steps.",
    )
    question_key: str = setting("question", "Column that holds the question, for kind=files.")
    answer_key: str = setting("answer", "Column that holds the reference answer, for kind=files.")
    options: dict[str, Any] = setting(
        {}, "Further settings of the source, such as those of a reasoning-gym data set."
    )


@dataclass
class AlgorithmConfig:
    """One point of DeepSeekMath's unified view of algorithms; see docs/algorithms.md."""

    name: str = setting("grpo", "Name of the algorithm in reports and messages.")
    source: str = setting(
        "", "Authors, arXiv number and equations, in words for docs/algorithms.md."
    )
    rewards: str = setting("", "Where rewards come from, in words for docs/algorithms.md.")
    coefficient: str = setting(
        "", "The factor of the gradient of log pi, in words for docs/algorithms.md."
    )
    data: str = setting(
        "policy",
        "Where training answers come from: the current policy, a data set of answers, pairs of "
        "answers, or samples of the SFT model.",
        choices=("policy", "dataset", "pairs", "sft_samples"),
    )
    advantage: str = setting(
        "grpo",
        "Function from rewards to advantages: one that learner/algorithms/advantages/ registers.",
    )
    loss: str = setting(
        "ppo_clip",
        "Policy-gradient loss of a token (learner/algorithms/losses.py).",
        choices=("ppo_clip", "gspo", "cispo", "reinforce", "sft"),
    )
    normaliser: str = setting(
        "sequence_mean",
        "What the sum of token losses is divided by: each answer's length and then the number of "
        "answers, the number of all tokens, or `loss_constant` times the number of answers.",
        choices=("sequence_mean", "token_mean", "constant"),
    )
    loss_constant: float | None = setting(
        None, "Divisor in tokens, for normaliser=constant; usually rollout.max_tokens."
    )
    eps_low: float = setting(
        0.2, "The probability ratio is clipped from below at 1 - eps_low.", low=0
    )
    eps_high: float = setting(
        0.2, "The probability ratio is clipped from above at 1 + eps_high.", low=0
    )
    dual_clip: float | None = setting(
        None,
        "Bounds the loss of tokens with a negative advantage by this multiple of the advantage "
        "(1912.09729); null: off.",
        above=1,
    )
    beta: float = setting(0.0, "Coefficient of the KL divergence to the reference model.", low=0)
    kl: str = setting(
        "k3",
        "Estimator of the KL divergence (learner/algorithms/kl.py).",
        choices=("k1", "k2", "k3", "k3_iw"),
    )
    kl_placement: str = setting(
        "loss",
        "Whether the KL term is added to the loss, subtracted from the reward, or left out.",
        choices=("loss", "reward", "none"),
    )
    std_normalise: bool = setting(
        True, "Whether advantages are divided by the standard deviation of the rewards."
    )
    group_baseline: bool = setting(
        True, "Whether the baseline is computed within a group, which then needs 2 answers or more."
    )
    entropy_coef: float = setting(0.0, "Coefficient of the entropy bonus in the loss.", low=0)
    tis_cap: float | None = setting(
        None,
        "Cap of the truncated importance weights that correct for the generator's policy; "
        "null: no correction.",
        above=0,
    )
    mask_truncated: bool = setting(
        False, "Whether answers cut at rollout.max_tokens are left out of the loss."
    )
    gamma: float = setting(1.0, "Discount factor per token.", low=0, high=1)
    lam: float = setting(
        1.0, "Lambda of generalised advantage estimation (1506.02438).", low=0, high=1
    )
    critic: bool = setting(False, "Whether a critic is trained; advantage=gae needs one.")
    filter: str = setting(
        "none",
        "What happens to dead groups, whose rewards are all equal: they are trained on, left out, "
        "weighted down, or left out and replaced by further groups.",
        choices=("none", "skip_dead", "down_weight", "resample"),
    )
    reference_reset_every: int = setting(
        0, "The reference becomes the policy after each so many steps; 0: never.", low=0
    )
    exact_kl_tokens: int = setting(
        0,
        "Number of tokens per step whose KL to the reference is computed over the whole "
        "vocabulary and logged; 0: none.",
        low=0,
    )
    options: dict[str, Any] = setting(
        {}, "Settings that only some algorithms read, such as critic_lr; see docs/algorithms.md."
    )


@dataclass
class RewardConfig:
    """What an answer is worth."""

    rules: dict[str, float] = setting(
        {}, "Weight of each rule and of each model of `models`; 0: measured, but no reward."
    )
    models: dict[str, Any] = setting(
        {}, "Reward models by name, each with the path of its folder: {orm: {path: FOLDER}}."
    )
    combine: str = setting(
        "sum",
        "How weighted rewards become one: their sum or their product.",
        choices=("sum", "product"),
    )
    timeout_s: float = setting(
        10.0, "Seconds after which the grading of one answer is stopped.", above=0
    )
    workers: int = setting(1, "Number of processes that grade answers.", low=1)
    max_failure_share: float = setting(
        0.25, "The run stops when more than this share of a step's rewards failed.", low=0, high=1
    )
    options: dict[str, Any] = setting(
        {},
        "Settings of single rules, rules by data source, and own functions; see docs/rewards.md.",
    )


@dataclass
class RewardModelConfig:
    """How reward models are served (all of reward.models), and how one is trained."""

    count: int = setting(1, "Number of actors that serve reward models, each with all.", low=1)
    threads: int = setting(
        1, "Torch threads of an actor that serves reward models; 0: its share of CPUs.", low=0
    )
    cpus: float = setting(0.5, "CPUs that an actor reserves.", low=0)
    gpus: float = setting(0.0, "GPUs that an actor reserves.", low=0)
    batch_tokens: int = setting(8192, "Padded tokens of one forward pass, at most.", low=1)
    timeout_s: float = setting(
        300.0, "Seconds within which a batch of answers must be scored.", above=0
    )
    kind: str = setting(
        "outcome",
        "What is trained: one score per answer, or one at the end of each step (data.steps).",
        choices=("outcome", "process"),
    )
    head: str = setting(
        "scalar",
        "Where the score comes from: a linear head, or beta * log(pi / pi_ref) of the answer, "
        "without a head (2412.01981).",
        choices=("scalar", "implicit"),
    )
    beta: float = setting(0.2, "Logits per nat of log(pi / pi_ref), for head=implicit.", above=0)
    loss: str = setting(
        "pointwise",
        "Cross entropy of single answers, or of pairs of answers (Bradley-Terry).",
        choices=("pointwise", "pairwise"),
    )
    init: str = setting(
        "", "Language or reward model that training starts from; empty: model.path."
    )
    source: str = setting(
        "policy",
        "Where labelled answers come from: samples of the policy graded by reward.rules, or files.",
        choices=("policy", "files"),
    )
    path: str = setting("", "Labelled answers in Parquet or JSON lines, for source=files.")
    heldout_path: str = setting(
        "",
        "Labelled answers that are never trained on, for source=files; empty: `heldout_share` of "
        "the prompts in `path`.",
    )
    heldout_share: float = setting(0.1, "Share of prompts that are held out.", above=0, below=1)
    label: str = setting(
        "soft",
        "Label of an annotated step: the share of completions that are right, or whether any is.",
        choices=("soft", "hard"),
    )
    prompts: int = setting(
        256,
        "Number of prompts sampled for one training, each rollout.group_size times, for "
        "source=policy.",
        low=1,
    )
    steps: int = setting(60, "Number of optimizer steps of one training.", low=1)
    batch: int = setting(
        128, "Number of answers in an optimizer step (of pairs, for loss=pairwise).", low=1
    )
    lr: float = setting(2e-5, "Learning rate.", low=0)
    every: int = setting(
        0,
        "With stage=rl, train the model `refresh` again after each so many steps; 0: never.",
        low=0,
    )
    refresh: str = setting(
        "", "With stage=rl, name of the model of reward.models that is trained again."
    )
    initial: bool = setting(
        False, "With stage=rl, train the model `refresh` before the first step too."
    )
    replay: float = setting(
        0.1,
        "Share of training answers from earlier iterations (2402.03300, section 4.1.4).",
        low=0,
        below=1,
    )


@dataclass
class AnnotateConfig:
    """stage=annotate: a label for each step of sampled answers (Math-Shepherd, 2312.08935)."""

    prompts: int = setting(128, "Number of prompts.", low=1)
    answers: int = setting(4, "Number of answers sampled for each prompt.", low=1)
    completions: int = setting(8, "Number of completions sampled for each prefix.", low=1)
    temperature: float = setting(
        1.0,
        "Sampling temperature of the answers; completions are sampled at rollout.temperature.",
        above=0,
    )


@dataclass
class RolloutConfig:
    """How many answers are sampled in a step, and how."""

    prompts_per_step: int = setting(32, "Number of prompts in a training step.", low=1)
    group_size: int = setting(8, "Number of completions sampled for each prompt.", low=1)
    max_tokens: int = setting(64, "Longest completion in tokens.", low=1)
    temperature: float = setting(1.0, "Sampling temperature.", above=0)
    top_p: float = setting(
        1.0, "Probability mass that tokens are sampled from; training needs 1.", above=0, high=1
    )
    top_k: int = setting(
        0,
        "Number of most likely tokens that are sampled from; 0: all, which training needs.",
        low=0,
    )
    max_staleness: int = setting(
        0,
        "How many policy versions older than the learner's a completion may be; 0: strictly "
        "on-policy.",
        low=0,
    )
    timeout_s: float = setting(600.0, "Seconds within which a group must be generated.", above=0)


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = setting(1e-6, "Peak learning rate.", low=0)
    warmup_steps: int = setting(
        0, "Number of steps over which the learning rate rises linearly to its peak.", low=0
    )
    decay: str = setting(
        "constant", "Learning rate after the warm-up.", choices=("constant", "cosine")
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay.", low=0)
    beta1: float = setting(0.9, "Decay rate of the mean of the gradient.", low=0, below=1)
    beta2: float = setting(0.999, "Decay rate of the mean of its square.", low=0, below=1)
    eps: float = setting(1e-8, "Added to the denominator of an update.", above=0)
    grad_clip: float = setting(
        1.0, "Largest norm of the gradient; longer ones are scaled down to it. 0: off.", low=0
    )
