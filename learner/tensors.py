"""A DeepSpeed engine's whole state as float32 safetensors, and back: weights and AdamW's moments by parameter name.

Works across ZeRO stages and numbers of ranks, because what is written is whole. Every rank calls; rank 0 writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


def start_count_at_zero(optimizer: torch.optim.Optimizer) -> None:
    """ZeRO makes its optimizer state by a step on zero gradients, which AdamW counts: its first real step would then
    be corrected as its second. With this every stage starts alike."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(torch.as_tensor(state["step"], dtype=torch.float32))


def save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, zero_stage: int, rank: int) -> None:
    """Write `path`: param/NAME, exp_avg/NAME, exp_avg_sq/NAME and step. Raises OSError, on a full disk for one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, p in module.named_parameters():
        whole = {"param": _parameter(p, zero_stage)} | {m: _moment(p, m, optimizer, zero_stage) for m in MOMENTS}
        if rank == 0:
            tensors |= {f"{k}/{name}": v.detach().float().cpu().contiguous().clone()
                        for k, v in whole.items() if v is not None}
    steps = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    if rank == 0:
        tensors["step"] = torch.tensor([max(steps, default=0.0)])
        write(path, tensors)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """safetensors' save_file, whose failures to write are the OSErrors that they are. (It has an error of its own.)"""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def load_weights(path: Path, module: nn.Module) -> None:
    """Copy the saved parameters into a module that DeepSpeed has not wrapped yet. Raises KeyError for a missing one."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file, torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(file.get_tensor(f"param/{name}"))


def load_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, zero_stage: int) -> None:
    """Put the saved moments and step count into a wrapped module's optimizer; float32 masters too where weights are
    held in less."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = set(file.keys())
        step = file.get_tensor("step")[0].clone()
        for name, p in module.named_parameters():
            if f"exp_avg/{name}" not in names:  # saved before the first step
                continue
            values = {m: file.get_tensor(f"{m}/{name}") for m in MOMENTS}
            if zero_stage == 0:
                optimizer.state[p] = {"step": step.clone(), **{m: v.clone() for m, v in values.items()}}
                continue
            for m, v in values.items():
                safe_set_full_optimizer_state(p, v, m)
            if p.dtype != torch.float32:
                safe_set_full_fp32_param(p, file.get_tensor(f"param/{name}"))
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = step.clone()


def _parameter(p: nn.Parameter, zero_stage: int) -> Any:
    from deepspeed.utils import safe_get_full_fp32_param

    return p if zero_stage == 0 else safe_get_full_fp32_param(p)


def _moment(p: nn.Parameter, name: str, optimizer: torch.optim.Optimizer, zero_stage: int) -> Any:
    from deepspeed.utils import safe_get_full_optimizer_state

    if zero_stage == 0:
        return optimizer.state.get(p, {}).get(name)
    return safe_get_full_optimizer_state(p, name)
