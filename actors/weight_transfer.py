"""Weights into vLLM through its own weight-transfer interface, from NumPy views of the object store.

A bucket is one flat uint8 array in the object store and a list of (name, dtype, shape, offset) entries. The engine
reads views of it (zero-copy on the node that holds it), checks its checksum and lets vLLM load them.

Two things vLLM leaves to us on the CPU: its base class ends an update in an accelerator call, and it re-packs only
layers that *received* weights. A tied output projection receives none and would silently keep the old matrix
(docs/architecture.md, "Weights"); `finish_weight_update` re-packs every embedding and head.
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
    """Weights arrived damaged, or the generator does not compute what the learner computes."""


@dataclass
class ObjectStoreInit(WeightTransferInitInfo):
    pass


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """`buffer`: uint8 [bytes]; `entries`: what lies where; `digest`: the learner's checksum of the buffer."""

    buffer: np.ndarray
    entries: list[Entry]
    digest: str


class ObjectStoreEngine(WeightTransferEngine[ObjectStoreInit, ObjectStoreUpdate]):
    """vLLM weight-transfer backend `object_store`: CPU, and across nodes through Ray's object store."""

    init_info_cls = ObjectStoreInit
    update_info_cls = ObjectStoreUpdate

    def init_transfer_engine(self, init_info: ObjectStoreInit) -> None:
        """Nothing to rendezvous: a bucket is addressed by its object reference."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        found = checksum(update_info.buffer)
        if found != update_info.digest:
            raise WeightSyncError(
                f"bucket with {update_info.entries[0].name}: checksum {found}, "
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
        """Pack embeddings and output heads again: a tied head receives no weight of its own (see module docstring)."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):  # ParallelLMHead is a subclass
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Holds nothing."""


def view(buffer: np.ndarray, entry: Entry) -> torch.Tensor:
    """A tensor of `entry` inside `buffer`, without a copy. The buffer is read-only: never write to the result."""
    dtype = getattr(torch, entry.dtype)
    count = int(np.prod(entry.shape, dtype=np.int64))
    piece = buffer[entry.offset : entry.offset + count * dtype.itemsize]
    with warnings.catch_warnings():  # torch warns of read-only memory; vLLM's loaders only read
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(piece, dtype=dtype).view(entry.shape)


def register() -> None:
    """Make `weight_transfer_config={"backend": "object_store"}` known to vLLM in this process (idempotent)."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreEngine)
