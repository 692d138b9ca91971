"""From token states to one vector, as a sentence-transformers directory describes it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from gpu_worker.engines.unary.activation import build_activation
from gpu_worker.engines.unary.padding import PaddedBatch

PoolingMode = Literal["mean", "cls", "lasttoken"]
POOLING_MODES = ("mean", "cls", "lasttoken")
SUPPORTED_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
VectorLayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pooling:
    """How `[rows, tokens, size]` states become vectors; `layers` follow each other behind it."""

    mode: PoolingMode
    layers: tuple[VectorLayer, ...]

    @classmethod
    def from_directory(cls, directory: Path, device: torch.device) -> "Pooling":
        """From `modules.json`. Raises ValueError, naming it, for a step or a mode unknown here."""
        path = directory / "modules.json"
        steps = [(m["type"].rsplit(".", 1)[-1], directory / m["path"]) for m in _read_json(path)]
        if unknown := {step for step, _ in steps}.difference(SUPPORTED_MODULES):
            raise ValueError(f"{path} has steps unknown here: {', '.join(sorted(unknown))}")
        modes = [_read_mode(place / "config.json") for step, place in steps if step == "Pooling"]
        return cls(modes[0] if modes else "mean", tuple(_load_layers(steps, device)))

    @property
    def normalises(self) -> bool:
        """Whether vectors are of length one."""
        return self.layers[-1:] == (normalize,)

    def __call__(self, states: Tensor, batch: PaddedBatch) -> Tensor:
        """Vectors `[rows, size]` in float32."""
        vectors = self._pool(states.float(), batch)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors

    def _pool(self, states: Tensor, batch: PaddedBatch) -> Tensor:
        if self.mode == "cls":
            return states[:, 0]
        if self.mode == "lasttoken":
            return batch.select_last(states)
        weights = batch.mask[..., None].float()
        return (states * weights).sum(1) / weights.sum(1)


def _load_layers(steps: list[tuple[str, Path]], device: torch.device) -> Iterator[VectorLayer]:
    for step, place in steps:
        if step == "Dense":
            yield _load_dense(place).to(device)
        elif step == "Normalize":
            yield normalize


def _load_dense(place: Path) -> nn.Module:
    """A linear layer and its activation, with the weights beside its configuration."""
    settings = _read_json(place / "config.json")
    if settings.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ValueError(f"{place} is a layer over single tokens, which is not possible here")
    weights = load_file(place / "model.safetensors")
    linear = nn.Linear(
        settings["in_features"], settings["out_features"], bias="linear.bias" in weights
    )
    linear.load_state_dict({name.removeprefix("linear."): w for name, w in weights.items()})
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    return nn.Sequential(linear, build_activation(name)).eval()


def _read_mode(path: Path) -> PoolingMode:
    settings = _read_json(path)
    modes = [settings["pooling_mode"]] if "pooling_mode" in settings else _read_mode_flags(settings)
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        raise ValueError(
            f"{path} asks for pooling {modes}; one of {', '.join(POOLING_MODES)} is possible"
        )
    return cast(PoolingMode, modes[0])


def _read_mode_flags(settings: dict[str, object]) -> list[str]:
    """Modes in the older style: `"pooling_mode_mean_tokens": true`."""
    on = [key.removeprefix("pooling_mode_") for key, value in settings.items() if value is True]
    return [
        key.removesuffix("_tokens").removesuffix("_token") for key in on if key != "include_prompt"
    ]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())
