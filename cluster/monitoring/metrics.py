"""Name, unit and reduction of everything that a run measures. Pure.

Each name has one definition, in METRICS, from which docs/metrics.md is generated. Values travel as
`Stat` = (sum, count, min, max) and are reduced once, by `flatten`, so that a mean is never a mean
of means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.monitoring.stat import MetricError, Stat
from cluster.monitoring.vocabulary import REGIMES, STATUSES
from cluster.roster import ROLES

SHARE_SLACK = 1e-9  # rounding of a share that is 1 in exact arithmetic


@dataclass(frozen=True)
class Metric:
    """The definition of a metric.

    unit: "share" is asserted to lie in [0, 1].
    help: what is measured.
    reduce: how a Stat becomes one number; "spread" writes NAME/mean, NAME/min and NAME/max.
    source: the name of the same quantity in verl or TRL, if they have it.
    """

    unit: str
    help: str
    reduce: str = "last"  # last | mean | sum | min | max | spread
    source: str = ""


M = Metric
GROUP_STATES = {
    "admitted": "groups taken in since the run began",
    "trained": "of those, trained on",
    "filtered": "of those, left out for a reason",
    "in_flight": "of those, being generated or scored",
    "queued": "of those, scored and waiting",
}
# A name may end in {placeholder}: it then covers a family, such as reward_part/accuracy.
METRICS: dict[str, Metric] = {
    "step": M("steps", "the step that was written last; in every row", "last"),
    "time": M(
        "s", "when that was, since 1970: a run that writes nothing for long is stalled", "last"
    ),
    "reward": M(
        "reward",
        "total reward of a completion with status ok",
        "spread",
        "verl critic/rewards/*, TRL reward",
    ),
    "reward/group_std": M(
        "reward", "standard deviation of the reward inside a group", "mean", "TRL reward_std"
    ),
    "reward/zero_std_share": M(
        "share", "groups whose rewards are all equal", "mean", "TRL frac_reward_zero_std"
    ),
    "reward/accuracy": M("share", "completions whose answer is right, of those graded", "mean"),
    "reward/format": M("share", "completions in the asked format, of those graded", "mean"),
    **{f"reward/{s}_share": M("share", f"rewards with status {s}", "mean") for s in STATUSES},
    "reward_part/{rule}": M(
        "reward", "one rule's score before its weight", "mean", "TRL rewards/*/mean"
    ),
    "reward_gap/{model}": M(
        "reward", "mean score of a reward model less gold accuracy, same answers", "mean"
    ),
    "reward/overlong_penalty": M(
        "reward", "what algorithm.options.overlong_share took off a reward", "mean"
    ),
    "data/curriculum_level": M("1", "difficulty level the curriculum is at", "last"),
    "advantage": M("1", "advantage of a sample", "spread", "verl critic/advantages/*"),
    "response_length": M("tokens", "completion length", "spread", "verl response_length/*"),
    "response_length/clip_ratio": M(
        "share", "finish_reason = length", "mean", "verl, TRL completions/clipped_ratio"
    ),
    "prompt_length": M("tokens", "prompt length", "spread", "verl prompt_length/*"),
    **{
        f"regime/{kind}": M("share", f"groups that are {why}", "mean")
        for kind, why in REGIMES.items()
    },
    "actor/loss": M("1", "loss the optimizer saw, all terms, global normaliser", "mean"),
    "actor/pg_loss": M(
        "1",
        "policy loss of a token, mean over tokens; near 0 on-policy",
        "mean",
        "verl actor/pg_loss",
    ),
    "actor/kl_loss": M(
        "nats", "KL to the reference per token (k3)", "mean", "verl actor/kl_loss, TRL kl"
    ),
    "actor/kl_exact": M(
        "nats", "KL to the reference over the whole vocabulary, on one completion", "mean"
    ),
    "actor/ppo_kl": M(
        "nats",
        "KL to the policy that scored the batch, per token (k3)",
        "mean",
        "verl actor/ppo_kl",
    ),
    "actor/entropy": M(
        "nats", "entropy of the next-token distribution", "mean", "verl actor/entropy, TRL entropy"
    ),
    "actor/ratio": M("1", "importance ratio of a token", "spread"),
    "actor/tis_weight": M("1", "truncated importance weight, train over generate", "spread"),
    "actor/grad_norm": M(
        "1", "gradient norm before clipping", "mean", "verl actor/grad_norm, TRL grad_norm"
    ),
    "actor/lr": M(
        "1", "learning rate of the last optimizer step", "last", "verl actor/lr, TRL learning_rate"
    ),
    "actor/skipped_steps": M(
        "steps", "optimizer steps skipped because the gradient was not finite", "sum"
    ),
    "actor/pg_clipfrac_lower": M(
        "share", "tokens held by the dual clip", "mean", "verl actor/pg_clipfrac_lower"
    ),
    "clip_ratio/low_mean": M(
        "share", "tokens clipped at 1 - eps_low", "mean", "TRL clip_ratio/low_mean"
    ),
    "clip_ratio/high_mean": M(
        "share", "tokens clipped at 1 + eps_high", "mean", "TRL clip_ratio/high_mean"
    ),
    "critic/vf_loss": M("1", "value loss of a token", "mean", "verl critic/vf_loss"),
    "critic/values": M("reward", "predicted value of a token", "spread", "verl critic/values/*"),
    "critic/vf_explained_var": M(
        "1", "share of the targets' variance the values explain; at most 1", "mean", "verl"
    ),
    "critic/vf_clipfrac": M(
        "share", "tokens whose value is clipped", "mean", "verl critic/vf_clipfrac"
    ),
    "pretrain/loss": M("nats", "next-token cross-entropy on the corpus", "mean"),
    "reward_model/loss": M(
        "nats", "loss of the reward model that is trained, mean over its labelled ends", "mean"
    ),
    "reward_model/heldout/{measure}": M(
        "1",
        "the trained reward model on held-out answers: auc, accuracy, loss, "
        "brier, calibration_error",
        "last",
    ),
    "reward_model/older_answers": M(
        "answers", "of earlier iterations, which the reward model saw again", "last"
    ),
    "reward_model/iteration": M("1", "how often iterative RL has trained its reward model", "last"),
    "training/rollout_logprob_diff": M(
        "nats", "|train - generate| log-prob of the sampled tokens", "spread"
    ),
    "training/policy_version": M("versions", "version of the policy after the step", "last"),
    "training/staleness": M(
        "versions", "trained version minus the version that generated", "spread"
    ),
    "sync/logprob_max_abs_diff": M(
        "nats", "largest |learner - generator| log-prob of the probe after a sync", "max"
    ),
    "sync/bytes": M("bytes", "weights published in a sync", "sum"),
    **{f"groups/{state}": M("groups", why, "last") for state, why in GROUP_STATES.items()},
    "guard/{name}": M(
        "share", "1 while the warning holds (learner/evaluation/guards.py), else 0", "last"
    ),
    **{
        f"{role}/restarts": M("restarts", f"{what} started again since the program began", "last")
        for role, what in ROLES.items()
        if role != "reward_learner"  # lives during a refresh and is not in any row
    },
    "generator/serving": M(
        "generators", "generators that work is given to; fewer while a node is lost", "last"
    ),
    "timing_s/{phase}": M(
        "s", "wall time of a phase: gen, reward, ref, adv, update, sync, eval, save", "sum", "verl"
    ),
    "timing_s/step": M("s", "wall time of the whole step", "sum", "verl timing_s/step"),
    "perf/total_num_tokens": M("tokens", "prompt and completion tokens of the step", "sum", "verl"),
    "perf/trained_tokens": M(
        "tokens", "prompt and completion tokens that the learner trained on", "sum"
    ),
    "perf/tokens_per_s": M(
        "tokens/s", "completion tokens of the step over its wall time, whole run", "last"
    ),
    "perf/gen_tokens_per_s": M(
        "tokens/s", "completion tokens over the time spent generating", "last"
    ),
    "eval/pass@{k}": M(
        "share", "unbiased estimate that one of k samples is right, held-out set", "last"
    ),
    "eval/maj@{k}": M("share", "plurality answer of k samples is right, held-out set", "last"),
    "eval/best@{k/model}": M(
        "share", "of k samples, at most 16, the one with the highest score is right", "last"
    ),
    "eval/weighted_maj@{k/model}": M(
        "share", "of k samples, at most 16, the answer of most score is right", "last"
    ),
    "eval/format": M("share", "held-out completions in the asked format", "last"),
    "eval/length": M("tokens", "mean held-out completion length", "last"),
    "eval/prompts": M("prompts", "held-out prompts evaluated", "last"),
    "eval/samples": M("samples", "held-out completions sampled", "last"),
    "eval/ungraded": M("samples", "held-out completions whose reward status was not ok", "last"),
}
# The name of a quantity in learner/algorithms/losses.py and learner/engine/rank.py, and its metric.
LOSS_NAMES = {
    "policy_loss": "actor/pg_loss",
    "kl_ref": "actor/kl_loss",
    "kl_exact": "actor/kl_exact",
    "kl_old": "actor/ppo_kl",
    "entropy": "actor/entropy",
    "ratio": "actor/ratio",
    "tis_weight": "actor/tis_weight",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
    "dual_clip_fraction": "actor/pg_clipfrac_lower",
    "value_loss": "critic/vf_loss",
    "value": "critic/values",
    "value_clip_fraction": "critic/vf_clipfrac",
    "explained_variance": "critic/vf_explained_var",
}
FAMILIES = [
    (name.partition("{")[0], name.partition("}")[2], name) for name in METRICS if "{" in name
]


def find(name: str) -> Metric:
    """Return the definition of a metric. Raises MetricError where there is none."""
    if "{" not in name:
        if name in METRICS:
            return METRICS[name]
        for prefix, suffix, family in FAMILIES:
            if (
                name.startswith(prefix)
                and name.endswith(suffix)
                and len(name) > len(prefix) + len(suffix)
            ):
                return METRICS[family]
    raise MetricError(
        f"metric {name!r} has no definition; add it to METRICS in cluster/monitoring/metrics.py"
    )


def flatten(values: Mapping[str, float | Stat]) -> dict[str, float]:
    """Reduce every value to one float for each written name. Raises MetricError for an unknown name
    and for a share outside [0, 1].

    >>> flatten({"response_length": Stat.of([2, 4]), "reward/accuracy": Stat(3, 4)})
    {'response_length/mean': 3.0, 'response_length/min': 2.0, 'response_length/max': 4.0,
    'reward/accuracy': 0.75}
    """
    flat: dict[str, float] = {}
    for name, value in values.items():
        metric = find(name)
        if metric.reduce == "spread":
            if not isinstance(value, Stat):
                raise MetricError(
                    f"metric {name!r} is written as mean, min and max; give a Stat, not {value!r}"
                )
            flat |= {f"{name}/{how}": float(value.reduce(how)) for how in ("mean", "min", "max")}
        else:
            flat[name] = float(value.reduce(metric.reduce) if isinstance(value, Stat) else value)
        if metric.unit == "share" and not math.isnan(flat[name]):
            if not -SHARE_SLACK <= flat[name] <= 1 + SHARE_SLACK:
                raise MetricError(
                    f"metric {name!r} is a share, but its value is {flat[name]}: expected 0 to 1"
                )
    return flat


def describe(written: str) -> Metric:
    """Return the definition of a written name, such as that of a spread's NAME/mean, NAME/min and
    NAME/max."""
    base, _, suffix = written.rpartition("/")
    if suffix in ("mean", "min", "max") and METRICS.get(base, M("", "")).reduce == "spread":
        return replace(METRICS[base], help=f"{METRICS[base].help} ({suffix})")
    return find(written)


def table() -> str:
    """Return the table of docs/metrics.md, in Markdown."""
    rows = ["| name | unit | reduced by | meaning | same as |", "| --- | --- | --- | --- | --- |"]
    for name, m in METRICS.items():
        written = f"{name}/mean, /min, /max" if m.reduce == "spread" else name
        meaning = m.help.replace("|", "\\|")
        rows.append(f"| `{written}` | {m.unit} | {m.reduce} | {meaning} | {m.source} |")
    return "\n".join(rows) + "\n"


DOC = """# Metrics

`python -m cluster.monitoring.metrics` generates this page from `cluster/monitoring/metrics.py`; a
test keeps the two equal.

- A share lies in [0, 1]. `mean` is the sum over the count of the whole step, never a mean of means.
- `metrics.jsonl` begins with a header (schema, run, units). Each line after it is one step: `step`,
  `time` (seconds since 1970) and the names below.
- A value that is not finite is written as null, and its name is listed under `non_finite`.
- "Same as" gives the name of the same quantity in verl or TRL.
- Ray exports the same values to Prometheus, as gauges named `ray_volley_` and the name, in which
  every character other than a letter or digit is replaced by `_`.

"""

if __name__ == "__main__":
    Path("docs/metrics.md").write_text(DOC + table())
