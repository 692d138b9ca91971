"""Pools token states to one vector, as a sentence-transformers directory describes it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from gpu_worker.engines.unary.activation import build_activation
from gpu_worker.engines.unary.padding import PaddedBatch
from registry.artifact_verification import json_reader
from registry.checkpoints.model_weights import check_layer_weights
from registry.sentence_encoder import (
    PoolingMode,
    VectorLayer,
    VectorModules,
    read_vector_modules,
)

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pooling:
    """Makes one vector per input of a model's token states `[rows, tokens, size]`.

    Pools by each of `modes` and joins the results, applies `layers` in order, and cuts the vectors
    to `truncate_dim` numbers, unless that is None.
    """

    modes: tuple[PoolingMode, ...]
    layers: tuple[Layer, ...] = ()
    truncate_dim: int | None = None

    @classmethod
    def from_directory(cls, directory: Path, device: torch.device) -> "Pooling":
        """Read the pooling and the layers after it from a directory's `modules.json`.

        Layers are loaded onto `device`. Raises `ArtifactRefused` for a module, pooling mode or
        activation that is not supported, and for weights that are not those of the settings.
        """
        modules: VectorModules = read_vector_modules(json_reader(directory))
        layers = _load_layers(directory, modules.layers, device)
        return cls(modules.modes, tuple(layers), modules.truncate_dim)

    @property
    def normalises(self) -> bool:
        """True if the last layer scales vectors to length one."""
        return self.layers[-1:] == (normalize,)

    def __call__(self, states: Tensor, batch: PaddedBatch) -> Tensor:
        """Return the vectors, float32 `[rows, size]`."""
        pooled = [_pool(mode, states.float(), batch) for mode in self.modes]
        vectors = torch.cat(pooled, dim=-1)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors[:, : self.truncate_dim]


def _pool(mode: PoolingMode, states: Tensor, batch: PaddedBatch) -> Tensor:
    """Pool by one mode; padding is on the right and counts in none."""
    if mode == "cls":
        return states[:, 0]
    if mode == "lasttoken":
        return batch.select_last(states)
    mask = batch.mask[..., None]
    if mode == "max":
        return states.masked_fill(mask == 0, -torch.inf).amax(1)
    weights = mask.float()
    if mode == "weightedmean":  # later tokens, which a decoder made of more, weigh more
        weights = weights * torch.arange(1, states.shape[1] + 1, device=states.device)[:, None]
    total = weights.sum(1)
    return (states * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def _load_layers(
    directory: Path, layers: tuple[VectorLayer, ...], device: torch.device
) -> Iterator[Layer]:
    for layer in layers:
        check_layer_weights(directory, layer)
        if layer.kind == "Dense":
            yield _load(_Dense(layer), directory, layer).to(device)
        elif layer.kind == "LayerNorm":
            yield _load(_LayerNorm(layer), directory, layer).to(device)
        elif layer.kind == "Normalize":
            yield normalize
        # Dropout does nothing outside of training


def _load(module: nn.Module, directory: Path, layer: VectorLayer) -> nn.Module:
    """Fill a layer with its weights, in float32, and return it in evaluation mode."""
    module.load_state_dict(load_file(directory / layer.path / "model.safetensors"))
    return module.eval()


class _Dense(nn.Module):
    """A linear layer with its activation and, where it has one, the way around both."""

    def __init__(self, layer: VectorLayer) -> None:
        super().__init__()
        shapes = layer.read_tensor_shapes()
        outputs, inputs = shapes["linear.weight"]
        self.linear = nn.Linear(inputs, outputs, bias="linear.bias" in shapes)
        self.activation = build_activation(layer.read_activation())
        self.residual: nn.Module | None = None
        if layer.has_residual():
            projects = "residual.weight" in shapes
            self.residual = nn.Linear(inputs, outputs, bias=False) if projects else nn.Identity()

    def forward(self, vectors: Tensor) -> Tensor:
        made: Tensor = self.activation(self.linear(vectors))
        return made if self.residual is None else made + self.residual(vectors)


class _LayerNorm(nn.Module):
    def __init__(self, layer: VectorLayer) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(layer.read_tensor_shapes()["norm.weight"])

    def forward(self, vectors: Tensor) -> Tensor:
        made: Tensor = self.norm(vectors)
        return made
