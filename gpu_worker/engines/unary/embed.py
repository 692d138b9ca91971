"""The embed engine: token states of an encoder or decoder, pooled as its directory says."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from gpu_worker.engines.checkpoints.loading import load_checkpoint, read_config
from gpu_worker.engines.unary.engine import UnaryEngine
from gpu_worker.engines.unary.padding import PaddedBatch
from gpu_worker.engines.unary.pooling import Pooling

POOLER = r"(^|\.)pooler\."  # weights behind the token states, which pooling here does not use


class Embedder:
    """The model of an `EmbedEngine` with its pooling: padded texts to one embedding each."""

    labels: list[str] | None = None

    def __init__(self, model: PreTrainedModel, pooling: Pooling) -> None:
        self.model, self._pooling = model, pooling
        self.normalises = pooling.normalises

    def __call__(self, batch: PaddedBatch) -> Tensor:
        """Return embeddings, float32 `[rows, size]`."""
        states = self.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
        return self._pooling(states, batch)


class EmbedEngine(UnaryEngine):
    """An `Engine` that embeds texts with the model of a sentence-transformers directory."""

    @staticmethod
    def load_head(directory: Path, device: torch.device) -> Embedder:
        """Load a directory's encoder or decoder and its pooling onto a device.

        Only local safetensors files are read. Raises what transformers raises for a directory that
        it cannot load, and ValueError for an unsupported pooling.
        """
        config = read_config(directory, device)
        model = load_checkpoint(AutoModel, directory, config, unused=POOLER)
        return Embedder(
            model.to(device).eval(),  # type: ignore[arg-type]
            Pooling.from_directory(directory, device),
        )
