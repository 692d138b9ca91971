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

        Layers are loaded onto `device`. Raises `ArtifactRefused` for a module or pooling mode that
        is not supported, ValueError for such an activation, and OSError if a file is missing.
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
        if layer.kind == "Dense":
            yield _Dense(directory, layer).to(device).eval()
        elif layer.kind == "LayerNorm":
            yield _load_layer_norm(directory, layer).to(device)
        elif layer.kind == "Normalize":
            yield normalize
        # Dropout does nothing outside of training


class _Dense(nn.Module):
    """A linear layer with its activation and, where it has one, the way around both."""

    def __init__(self, directory: Path, layer: VectorLayer) -> None:
        super().__init__()
        weights = load_file(directory / layer.path / "model.safetensors")
        self.linear = _load_linear(weights, "linear")
        name = layer.settings.get("activation_function") or "torch.nn.modules.activation.Tanh"
        self.activation = build_activation(name)
        self.residual: nn.Module | None = None
        if layer.settings.get("use_residual"):
            projects = "residual.weight" in weights
            self.residual = _load_linear(weights, "residual") if projects else nn.Identity()

    def forward(self, vectors: Tensor) -> Tensor:
        made: Tensor = self.activation(self.linear(vectors))
        return made if self.residual is None else made + self.residual(vectors)


def _load_linear(weights: dict[str, Tensor], name: str) -> nn.Linear:
    own = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(name)}
    outputs, inputs = own["weight"].shape
    linear = nn.Linear(inputs, outputs, bias="bias" in own)
    linear.load_state_dict(own)
    return linear


def _load_layer_norm(directory: Path, layer: VectorLayer) -> nn.Module:
    weights = load_file(directory / layer.path / "model.safetensors")
    norm = nn.LayerNorm(weights["norm.weight"].shape[0])
    norm.load_state_dict({key.removeprefix("norm."): w for key, w in weights.items()})
    return norm.eval()
