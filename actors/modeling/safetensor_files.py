"""Writing tensors as safetensors."""

from __future__ import annotations

from pathlib import Path

import torch


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """safetensors' save_file, whose failures to write are the OSErrors that they are. (It has an error of its own.)"""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
