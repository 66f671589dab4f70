"""Saving and loading the state of a DeepSpeed engine: weights and AdamW's moments, as safetensors.

The file holds whole float32 tensors by parameter name. A checkpoint can therefore be loaded with
another ZeRO stage or number of ranks. Every rank calls these functions; rank 0 writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.modeling.safetensor_files import write_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's state, with moments of zero, for a new engine.

    DeepSpeed creates it in the first optimizer step. That is too late for a checkpoint that is
    written or loaded before it. If the first step is skipped, DeepSpeed would never link it to the
    parameters.
    """
    # Under ZeRO-3 the optimizer's groups hold the partitions only during a step.
    owned = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None) or [
        p for group in optimizer.param_groups for p in group["params"]
    ]
    for p in owned:
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            **{m: torch.zeros_like(p.detach()) for m in MOMENTS},
        }
    if masters := getattr(engine.optimizer, "fp32_groups", None):  # bfloat16 without ZeRO
        for low, high in zip(engine.optimizer.fp16_groups, masters, strict=True):
            for p, master in zip(low, high, strict=True):
                p.master = master
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:  # ZeRO-1 and 2
        link()


def save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Write param/NAME, exp_avg/NAME, exp_avg_sq/NAME and step to `path`.

    Raises OSError if the file cannot be written, for example because the disk is full.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, p in module.named_parameters():
        whole = {"param": _parameter(p)} | {m: _moment(p, m, optimizer) for m in MOMENTS}
        if rank == 0:
            tensors |= {
                f"{k}/{name}": v.detach().float().cpu().contiguous().clone()
                for k, v in whole.items()
            }
    if rank == 0:
        tensors["step"] = torch.tensor([max(float(s["step"]) for s in optimizer.state.values())])
        write_tensors(path, tensors)


def load_weights(path: Path, module: nn.Module) -> None:
    """Copy the saved parameters into a module that DeepSpeed has not wrapped yet.

    Raises KeyError if a parameter is missing from the file.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file, torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(file.get_tensor(f"param/{name}"))


def load_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Copy the saved moments and step count into a wrapped module's optimizer, after `prepare`.

    For weights of lower precision, their float32 master copies are loaded too.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file, torch.no_grad():
        for name, p in module.named_parameters():
            for m in MOMENTS:
                _put(p, file.get_tensor(f"{m}/{name}"), m, optimizer)
            if p.dtype != torch.float32:
                _put(p, file.get_tensor(f"param/{name}"), None, optimizer)
        step = file.get_tensor("step")[0]
    for state in optimizer.state.values():
        state["step"].copy_(step)


def _managed(p: nn.Parameter) -> bool:
    """Return whether ZeRO shards this parameter's master copy and moments over the ranks."""
    return hasattr(p, "ds_id") or hasattr(p, "_hp_mapping")


def _parameter(p: nn.Parameter) -> torch.Tensor:
    """Return the whole parameter in float32, from its master copy if it has one."""
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(p) if _managed(p) else getattr(p, "master", p)


def _moment(p: nn.Parameter, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return a whole moment of a parameter; `name` is one of MOMENTS."""
    from deepspeed.utils import safe_get_full_optimizer_state

    return (
        safe_get_full_optimizer_state(p, name)
        if _managed(p)
        else optimizer.state[getattr(p, "master", p)][name]
    )


def _put(
    p: nn.Parameter, value: torch.Tensor, moment: str | None, optimizer: torch.optim.Optimizer
) -> None:
    """Set a moment of a parameter, or its float32 master copy if `moment` is None.

    value: the whole tensor, of which ZeRO keeps this rank's share.
    """
    from deepspeed import utils as ds

    if hasattr(p, "ds_id"):
        # ZeRO-3 gives every rank a share of equal size and pads the last. DeepSpeed's
        # safe_set_full_* functions ignore the padding, so this sets the local share.
        share, rank = p.ds_tensor.numel(), torch.distributed.get_rank()
        padded = nn.functional.pad(
            value.flatten(), (0, share * torch.distributed.get_world_size() - value.numel())
        )
        mine = padded.narrow(0, share * rank, share)
        if moment:
            ds.safe_set_local_optimizer_state(p, mine, moment)
        else:
            ds.safe_set_local_fp32_param(p, mine)
    elif hasattr(p, "_hp_mapping"):
        if moment:
            ds.safe_set_full_optimizer_state(p, value, moment)
        else:
            ds.safe_set_full_fp32_param(p, value)
    else:
        master = getattr(p, "master", p)
        (optimizer.state[master][moment] if moment else master).copy_(value)
