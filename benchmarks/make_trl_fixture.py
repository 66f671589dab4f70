"""Record what TRL's GRPO losses give on small seeded tensors, for
tests/unit/learner/test_losses.py.

TRL is no dependency of Volley. Run this in an environment that has it:

    pip install 'trl==1.16.*' 'torch==2.13.0'
    python benchmarks/make_trl_fixture.py tests/data/trl_losses.json

TRL's own `GRPOTrainer._compute_loss` runs, in float64, on a stand-in trainer that holds only the
settings the method reads; the model call is replaced by one that returns the log-probs of the
fixture. Recorded: the loss and its gradient with respect to them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl import GRPOTrainer

BATCH, LENGTH, MAX_LENGTH = 6, 7, 16
# name -> (settings of TRL, settings of Volley's AlgorithmConfig that mean the same)
CASES = {
    "grpo": (
        {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.04},
        {
            "loss": "ppo_clip",
            "normaliser": "sequence_mean",
            "eps_low": 0.2,
            "eps_high": 0.2,
            "beta": 0.04,
            "kl": "k3",
        },
    ),
    "grpo_k3_iw": (
        {
            "loss_type": "grpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.04,
            "use_bias_correction_kl": True,
        },
        {
            "loss": "ppo_clip",
            "normaliser": "sequence_mean",
            "eps_low": 0.2,
            "eps_high": 0.2,
            "beta": 0.04,
            "kl": "k3_iw",
        },
    ),
    "grpo_two_sided": (
        {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": 1.5},
        {
            "loss": "ppo_clip",
            "normaliser": "sequence_mean",
            "eps_low": 0.2,
            "eps_high": 0.2,
            "dual_clip": 1.5,
        },
    ),
    "grpo_tis": (
        {
            "loss_type": "grpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.04,
            "tis_cap": 1.2,
        },
        {
            "loss": "ppo_clip",
            "normaliser": "sequence_mean",
            "beta": 0.04,
            "kl": "k3",
            "tis_cap": 1.2,
        },
    ),
    "dapo": (
        {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
        {"loss": "ppo_clip", "normaliser": "token_mean", "eps_low": 0.2, "eps_high": 0.28},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
        {
            "loss": "ppo_clip",
            "normaliser": "constant",
            "loss_constant": float(MAX_LENGTH),
            "eps_low": 0.2,
            "eps_high": 0.2,
        },
    ),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.03,
            "epsilon_high": 0.04,
        },
        {"loss": "gspo", "normaliser": "sequence_mean", "eps_low": 0.03, "eps_high": 0.04},
    ),
    "cispo": (
        {
            "loss_type": "cispo",
            "epsilon_low": 1.0,
            "epsilon_high": 1.3,
        },  # TRL: the cap itself, no lower bound
        {"loss": "cispo", "normaliser": "token_mean", "eps_low": 1.0, "eps_high": 0.3},
    ),
}


def tensors() -> dict[str, torch.Tensor]:
    """Seeded inputs [B, T] float64; lengths 1..T, ratios on both sides of every clip bound."""
    draw = torch.Generator().manual_seed(20240203)
    logprobs = -torch.rand(BATCH, LENGTH, generator=draw, dtype=torch.float64) * 3
    shifts = (
        torch.randn(3, BATCH, LENGTH, generator=draw, dtype=torch.float64)
        * torch.tensor([0.4, 0.5, 0.3])[:, None, None]
    )
    lengths = torch.tensor([7, 1, 4, 6, 2, 5])
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + shifts[0],
        "ref_logprobs": logprobs + shifts[1],
        "behaviour_logprobs": logprobs + shifts[0] + shifts[2],
        "advantages": torch.tensor([1.25, -0.75, -1.5, 0.5, 2.0, -1.0], dtype=torch.float64),
        "mask": (torch.arange(LENGTH)[None] < lengths[:, None]).to(torch.float64),
    }


TRAINER_SETTINGS = (
    "loss_type",
    "importance_sampling_level",
    "beta",
    "epsilon_low",
    "epsilon_high",
)


def run_trl(settings: dict, data: dict[str, torch.Tensor]) -> tuple[float, list[list[float]]]:
    """Loss and gradient by TRL, one optimizer step of one micro-batch."""
    settings = {
        "importance_sampling_level": "token",
        "beta": 0.0,
        "delta": None,
        "use_bias_correction_kl": False,
    } | settings
    logprobs = data["logprobs"].clone().requires_grad_()
    cap = settings.get("tis_cap")
    trainer = SimpleNamespace(
        **{name: settings[name] for name in TRAINER_SETTINGS},
        args=SimpleNamespace(
            delta=settings["delta"], use_bias_correction_kl=settings["use_bias_correction_kl"]
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        # "eval": neither gradient accumulation nor several ranks
        model=SimpleNamespace(training=False),
        max_completion_length=MAX_LENGTH,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=cap is not None,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        _metrics={"eval": defaultdict(list)},
    )
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "num_items_in_batch": data["mask"].sum(),
        "old_per_token_logps": data["old_logprobs"],
        "ref_per_token_logps": data["ref_logprobs"],
    }
    if cap is not None:
        ratio = torch.exp(data["old_logprobs"] - data["behaviour_logprobs"])
        inputs["importance_sampling_ratio"] = torch.clamp(ratio, max=cap)
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def main(path: str) -> None:
    data = tensors()
    cases = {}
    for name, (theirs, ours) in CASES.items():
        loss, gradient = run_trl(theirs, data)
        cases[name] = {"trl": theirs, "volley": ours, "loss": loss, "gradient": gradient}
    record = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "inputs": {k: v.tolist() for k, v in data.items()},
    }
    Path(path).write_text(json.dumps(record | {"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
