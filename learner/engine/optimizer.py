"""A module wrapped in DeepSpeed: its configuration, its optimizer, and one optimizer step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner.engine import tensors


class SkippableAdamW(torch.optim.AdamW):
    """AdamW that does nothing in `step` while `skip` is set.

    DeepSpeed then still clears the gradients, while weights and moments keep their values.
    """

    skip = False

    def step(self, closure: Any = None) -> Any:
        """Make one optimizer step, or none."""
        return None if self.skip else super().step(closure)


def build_engine(
    cfg: Any, module: nn.Module, learning_rate: float, saved: Path | None
) -> tuple[Any, SkippableAdamW]:
    """Return (DeepSpeed engine, optimizer) of a module; the process group must exist.

    cfg: conf.schema.Config.
    saved: a file that learner.engine.tensors.save wrote, whose weights and optimizer state are
    loaded; None to start afresh.
    """
    import deepspeed

    if saved:
        tensors.load_weights(saved, module)
    o = cfg.optimizer
    optimizer = SkippableAdamW(
        module.parameters(),
        lr=learning_rate,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        weight_decay=o.weight_decay,
    )
    parameters = sum(p.numel() for p in module.parameters())
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=deepspeed_config(cfg, parameters)
    )
    tensors.prepare(engine, optimizer)
    if saved:
        tensors.load_optimizer(saved, module, optimizer)
    return engine, optimizer


def deepspeed_config(cfg: Any, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a module of that many parameters.

    cfg: conf.schema.Config. `learner.engine.accumulation` marks the last micro-batch of a step
    itself, so DeepSpeed's own numbers of micro-batches are all 1.
    """
    # DeepSpeed's default buckets take gigabytes, however small the model.
    bucket = int(min(5e8, max(parameters, 1024)))
    zero: dict[str, Any] = {"stage": cfg.learner.zero_stage}
    if cfg.learner.zero_stage:
        zero |= {"reduce_bucket_size": bucket, "overlap_comm": False}
    if cfg.learner.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "gradient_clipping": cfg.optimizer.grad_clip,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": cfg.model.dtype == "bfloat16"},
        "steps_per_print": 1 << 60,
    }


def optimizer_step(
    engine: Any, optimizer: SkippableAdamW, learning_rate: float, finite: bool
) -> dict[str, float]:
    """Make one optimizer step; return its grad_norm, skipped (0 or 1) and learning_rate.

    finite: whether the loss was finite on every rank. If the loss or the gradient was not, every
    rank skips the step, and weights and moments keep their values.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    norm = None
    if not engine.zero_optimization_stage():  # gradients are whole, and equal on all ranks
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        finite = finite and math.isfinite(norm)
    optimizer.skip = not finite
    engine.step()
    optimizer.skip = False
    if norm is None:
        norm = float(engine.get_global_grad_norm() or 0.0)
        finite = finite and not engine.optimizer.overflow
    return {"grad_norm": norm, "skipped": float(not finite), "learning_rate": learning_rate}
