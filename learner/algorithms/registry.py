"""Every algorithm as one value: data source x reward x gradient coefficient (DeepSeekMath section 5.2 and appendix
A.1).

The gradient is E over the data source of sum over tokens of coefficient * grad log pi. `conf/algorithm/NAME.yaml` picks
the parts: an advantage function, a loss function, the place of the KL term and a normaliser. `REGISTRY` says the same
in words and is what docs/algorithms.md is written from. A new algorithm is one small function in advantages.py or
losses.py, one YAML file and one entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.algorithms import advantages, kl, losses, regimes

DATA = {
    "policy": "current policy",
    "dataset": "data set of answers",
    "sft_samples": "samples of the SFT model",
    "pairs": "pairs of answers",
}
OPTIONS = {  # keys of algorithm.options, with what they mean; any other is refused
    "overlong_share": "last share of rollout.max_tokens over which DAPO's length penalty grows from 0 to -1",
    "value_clip": "range of the critic's clip around its old values; null: off",
    "value_lam": "lambda of the critic's targets where it differs from that of the advantages",
    "value_pretrain_steps": "steps that train the critic alone",
    "critic_lr": "learning rate of the critic; null: that of the policy",
    "dead_weight": "weight of dead groups with filter=down_weight; default 0.1",
    "max_draws": "with filter=resample: most groups drawn in a step, as a multiple of prompts_per_step; default 4",
}


@dataclass(frozen=True)
class AlgorithmSpec:
    """One row of the table. ``advantage``, ``loss``, ``normaliser``, ``data`` and ``kl`` (kind and place) are those of
    its YAML."""

    name: str
    data: str  # a key of DATA
    reward: str  # in words
    coefficient: (
        str  # multiplies grad log pi, before the normaliser; A is the advantage, rho = pi/pi_old
    )
    advantage: str
    loss: str
    kl: str  # "kind in the loss|reward", "in the implicit reward" or "none"
    normaliser: str
    source: str


RULE, ANY = "rule", "rule or outcome model"
_CLIP = "{} rho where the clip does not bind, else 0"
_ROWS = (
    AlgorithmSpec(
        "sft", "dataset", "none", "1", "constant", "sft", "none", "token_mean",
        "maximum likelihood; DeepSeekMath, 2402.03300, A.1.1",
    ),
    AlgorithmSpec(
        "rft", "sft_samples", RULE, "I(correct)", "correct", "reinforce", "none", "sequence_mean",
        "Yuan et al. 2023, 2308.01825",
    ),
    AlgorithmSpec(
        "online_rft", "policy", RULE, "I(correct)", "correct", "reinforce", "none", "sequence_mean",
        "DeepSeekMath, 2402.03300, A.1.3",
    ),
    AlgorithmSpec(
        "dpo", "pairs", "preference",
        "+-beta sigma(-margin), margin = beta (log(pi/pi_ref)(o+) - log(pi/pi_ref)(o-))", "dpo", "reinforce",
        "in the implicit reward", "constant", "Rafailov et al. 2023, 2305.18290, eq. 7",
    ),
    AlgorithmSpec(
        "ppo", "policy", ANY, _CLIP.format("A by GAE from a critic, times"), "gae", "ppo_clip", "k1 in the reward",
        "token_mean", "Schulman et al. 2017, 1707.06347, eq. 7; GAE: 1506.02438, eq. 16",
    ),
    AlgorithmSpec(
        "grpo", "policy", ANY, _CLIP.format("A = (r - mean)/std of the group, times") + "; + beta (pi_ref/pi - 1)",
        "grpo", "ppo_clip", "k3 in the loss", "sequence_mean", "DeepSeekMath, 2402.03300, eq. 3, 4",
    ),
    AlgorithmSpec(
        "grpo_process", "policy", "rule or process model",
        _CLIP.format("A = sum of normalised rewards of the steps still to end, times") + "; + beta (pi_ref/pi - 1)",
        "process", "ppo_clip", "k3 in the loss", "sequence_mean", "DeepSeekMath, 2402.03300, section 4.1.3",
    ),
    AlgorithmSpec(
        "rloo", "policy", ANY, _CLIP.format("A = r - mean of the group's others, times"), "rloo", "ppo_clip",
        "k1 in the reward", "token_mean", "Ahmadian et al. 2024, 2402.14740",
    ),
    AlgorithmSpec(
        "reinforce_pp", "policy", ANY, _CLIP.format("A = (reward-to-go - mean)/std of the batch, times"),
        "reinforce_pp", "ppo_clip", "k1 in the reward", "token_mean", "Hu et al. 2025, 2501.03262",
    ),
    AlgorithmSpec(
        "reinforce_pp_baseline", "policy", ANY,
        _CLIP.format("A = (r - group mean)/std of the batch, times") + "; - beta log(pi/pi_ref)",
        "reinforce_pp_baseline", "ppo_clip", "k2 in the loss", "token_mean", "Hu et al. 2025, 2501.03262",
    ),
    AlgorithmSpec(
        "dr_grpo", "policy", ANY, _CLIP.format("A = r - group mean, times"), "dr_grpo", "ppo_clip", "none",
        "constant", "Liu et al. 2025, 2503.20783",
    ),
    AlgorithmSpec(
        "dapo", "policy", "rule + overlong penalty", _CLIP.format("A of GRPO, times") + " (0.2 below, 0.28 above)",
        "grpo", "ppo_clip", "none", "token_mean", "Yu et al. 2025, 2503.14476, eq. 8, 13",
    ),
    AlgorithmSpec(
        "gspo", "policy", ANY, "A of GRPO times s = (pi/pi_old)(o)^(1/|o|) where the clip does not bind, else 0",
        "grpo", "gspo", "none", "sequence_mean", "Zheng et al. 2025, 2507.18071, eq. 5, 7",
    ),
    AlgorithmSpec(
        "cispo", "policy", ANY, "A of GRPO times min(rho, cap), never 0 by clipping", "grpo", "cispo", "none",
        "token_mean", "MiniMax 2025, 2506.13585, eq. 4, 5",
    ),
)  # fmt: skip
REGISTRY: dict[str, AlgorithmSpec] = {row.name: row for row in _ROWS}

TABLE_MARKS = ("<!-- table: python -m learner.algorithms.registry -->", "<!-- end of table -->")
HEADER = ("name", "data source", "reward", "gradient coefficient", "KL", "normaliser", "source")


def table() -> str:
    """The registry as a Markdown table: the body of docs/algorithms.md."""
    rows = [HEADER, ("---",) * len(HEADER)]
    for s in REGISTRY.values():
        rows.append(
            (
                f"`{s.name}`",
                DATA[s.data],
                s.reward,
                s.coefficient.replace("|", "\\|"),
                s.kl,
                s.normaliser,
                s.source,
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def check(cfg: Any) -> None:
    """Raise ValueError on an AlgorithmConfig whose parts are unknown or do not fit together; the message names the
    setting."""
    for key, value, known in (
        ("advantage", cfg.advantage, advantages.NAMES),
        ("loss", cfg.loss, tuple(losses.LOSSES)),
        ("normaliser", cfg.normaliser, losses.NORMALISERS),
        ("kl", cfg.kl, kl.KINDS),
        ("data", cfg.data, tuple(DATA)),
        ("filter", cfg.filter, regimes.FILTERS),
        *((f"options.{key}", key, tuple(OPTIONS)) for key in cfg.options),
    ):
        if value not in known:
            raise ValueError(
                f"algorithm.{key}={value!r} is not known: expected one of {', '.join(known)}"
            )
    for wrong, setting, why in (
        (cfg.beta > 0 and cfg.kl_placement == "loss" and cfg.kl == "k1", "kl=k1 with kl_placement=loss",
         "its gradient has mean 0; use k2 or k3 there, or kl_placement=reward"),
        (cfg.beta > 0 and cfg.kl_placement == "reward" and cfg.kl != "k1", f"kl={cfg.kl} with kl_placement=reward",
         "in the reward only k1 follows the reverse KL; set algorithm.kl=k1"),
        ((cfg.advantage == "gae") != cfg.critic, f"critic={cfg.critic} with advantage={cfg.advantage}",
         "advantage=gae needs algorithm.critic=true, and nothing else uses a critic"),
        ((cfg.advantage == "dpo") != (cfg.data == "pairs"), f"data={cfg.data} with advantage={cfg.advantage}",
         "advantage=dpo and data=pairs belong together"),
        (cfg.advantage == "dpo" and not cfg.beta > 0, f"beta={cfg.beta} with advantage=dpo", "expected more than 0"),
        (cfg.advantage == "dr_grpo" and cfg.std_normalise, "std_normalise=true with advantage=dr_grpo",
         "Dr. GRPO does not divide by the std; use advantage=grpo or set algorithm.std_normalise=false"),
        (cfg.dual_clip is not None and not cfg.dual_clip > 1 + cfg.eps_high, f"dual_clip={cfg.dual_clip}",
         f"expected more than 1 + eps_high = {1 + cfg.eps_high}, or null"),
        (cfg.tis_cap is not None and not cfg.tis_cap > 0, f"tis_cap={cfg.tis_cap}", "expected more than 0, or null"),
        (not 0 <= cfg.gamma <= 1, f"gamma={cfg.gamma}", "expected in [0, 1]"),
        (not 0 <= cfg.lam <= 1, f"lam={cfg.lam}", "expected in [0, 1]"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"algorithm.{setting}: {why}")


def write_table(path: Path) -> None:
    """Replace what stands between the two table marks of a Markdown file by `table()`."""
    before, _, rest = path.read_text().partition(TABLE_MARKS[0])
    _, mark, after = rest.partition(TABLE_MARKS[1])
    if not mark:
        raise ValueError(f"{path}: expected the lines {TABLE_MARKS[0]} and {TABLE_MARKS[1]}")
    path.write_text(f"{before}{TABLE_MARKS[0]}\n{table()}\n{TABLE_MARKS[1]}{after}")


if __name__ == "__main__":
    write_table(Path(__file__).parents[2] / "docs" / "algorithms.md")
