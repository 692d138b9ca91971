"""The embed engine: token states of an encoder or decoder, pooled as its directory says."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedModel

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

        Of a model with both, such as T5, it is the encoder, as in sentence-transformers. Only local
        safetensors files are read. Raises `UnsupportedModel` for a directory that transformers
        cannot load, and `ArtifactRefused` for layers behind the pooling that are not whole.
        """
        config = read_config(directory, device)
        auto_class = AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel
        model = load_checkpoint(auto_class, directory, config, unused=POOLER)
        return Embedder(
            model.to(device).eval(),  # type: ignore[arg-type]
            Pooling.from_directory(directory, device),
        )
