"""Weights enter vLLM through its own weight-transfer interface, from views of the object store.

A bucket is one flat uint8 array in the object store and a list of (name, dtype, shape, offset)
entries. The engine reads views of it (zero-copy on the node that holds it), verifies the checksum
and passes the views to vLLM, which loads them.

vLLM leaves two things to its users on the CPU. Its base class ends an update with a call to the
accelerator, which does not exist. And it re-packs only layers that *received* weights: a tied
output projection receives none and would silently keep the old matrix (docs/architecture.md,
"Weights"). `finish_weight_update` therefore re-packs every embedding and head.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from actors.records import Entry, checksum

BACKEND = "object_store"


class WeightSyncError(RuntimeError):
    """Weights arrived damaged, or the generator's log-probs are not those of the learner."""


@dataclass
class ObjectStoreInit(WeightTransferInitInfo):
    """No information is needed: a bucket is addressed by its object reference."""


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """One bucket. `buffer` is uint8 [bytes]; `digest` is the learner's checksum of it."""

    buffer: np.ndarray
    entries: list[Entry]
    digest: str


class ObjectStoreEngine(WeightTransferEngine[ObjectStoreInit, ObjectStoreUpdate]):
    """The vLLM weight-transfer backend `object_store`: on CPU, and across nodes through Ray."""

    init_info_cls = ObjectStoreInit
    update_info_cls = ObjectStoreUpdate

    def init_transfer_engine(self, init_info: ObjectStoreInit) -> None:
        """Nothing to do: a bucket is addressed by its object reference."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        digest = checksum(update_info.buffer)
        if digest != update_info.digest:
            raise WeightSyncError(
                f"bucket with {update_info.entries[0].name}: checksum {digest}, "
                f"the learner sent {update_info.digest}"
            )
        self.model.load_weights(
            [(e.name, view(update_info.buffer, e).to(self.device)) for e in update_info.entries]
        )

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self.repack_embeddings()

    def repack_embeddings(self) -> None:
        """Pack embeddings and heads again: a tied head receives no weights (module docstring)."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):  # ParallelLMHead is a subclass
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


def view(buffer: np.ndarray, entry: Entry) -> torch.Tensor:
    """The tensor of `entry` as a view of `buffer`. The buffer is read-only: never write to it."""
    dtype = getattr(torch, entry.dtype)
    count = int(np.prod(entry.shape, dtype=np.int64))
    piece = buffer[entry.offset : entry.offset + count * dtype.itemsize]
    with warnings.catch_warnings():  # torch warns of read-only memory; vLLM's loaders only read
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(piece, dtype=dtype).view(entry.shape)


def register() -> None:
    """Register the backend "object_store" with vLLM in this process. Idempotent."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreEngine)
