"""Writing tensors as safetensors."""

from __future__ import annotations

from pathlib import Path

import torch


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors by name to a safetensors file.

    Raises OSError if it cannot be written, where safetensors raises an error class of its own.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
