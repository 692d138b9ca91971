"""Pools token states to one vector, as a sentence-transformers directory describes it."""

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
    """Makes one vector per input of a model's token states `[rows, tokens, size]`.

    Pools by `mode` (mean of all tokens, first token, last token), then applies `layers` in order.
    """

    mode: PoolingMode
    layers: tuple[VectorLayer, ...]

    @classmethod
    def from_directory(cls, directory: Path, device: torch.device) -> "Pooling":
        """Read the pooling and the layers after it from a directory's `modules.json`.

        Without a pooling module the mode is `mean`. Layers are loaded onto `device`. Raises
        ValueError for a module, pooling mode or activation that is not supported, and names it;
        OSError if a file is missing.
        """
        path = directory / "modules.json"
        steps = [(m["type"].rsplit(".", 1)[-1], directory / m["path"]) for m in _read_json(path)]
        if unknown := {step for step, _ in steps}.difference(SUPPORTED_MODULES):
            raise ValueError(f"{path} has steps unknown here: {', '.join(sorted(unknown))}")
        modes = [_read_mode(folder / "config.json") for step, folder in steps if step == "Pooling"]
        return cls(modes[0] if modes else "mean", tuple(_load_layers(steps, device)))

    @property
    def normalises(self) -> bool:
        """True if the last layer scales vectors to length one."""
        return self.layers[-1:] == (normalize,)

    def __call__(self, states: Tensor, batch: PaddedBatch) -> Tensor:
        """Return the vectors, float32 `[rows, size]`."""
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
    for step, directory in steps:
        if step == "Dense":
            yield _load_dense(directory).to(device)
        elif step == "Normalize":
            yield normalize


def _load_dense(directory: Path) -> nn.Module:
    """Load a linear layer and its activation from a directory of configuration and weights.

    Raises ValueError for a layer over single tokens.
    """
    settings = _read_json(directory / "config.json")
    if settings.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ValueError(f"{directory} is a layer over single tokens, which is not supported")
    weights = load_file(directory / "model.safetensors")
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
    """Return the modes written in the older style, `"pooling_mode_mean_tokens": true`."""
    on = [key.removeprefix("pooling_mode_") for key, value in settings.items() if value is True]
    return [
        key.removesuffix("_tokens").removesuffix("_token") for key in on if key != "include_prompt"
    ]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())
