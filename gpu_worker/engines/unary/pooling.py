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

from gpu_worker.engines.unary.activation import activation
from gpu_worker.engines.unary.padding import Padded

Mode = Literal["mean", "cls", "lasttoken"]
MODES = ("mean", "cls", "lasttoken")
STEPS = ("Transformer", "Pooling", "Dense", "Normalize")
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pooling:
    """How `[rows, tokens, size]` states become vectors; `layers` follow each other behind it."""

    mode: Mode
    layers: tuple[Layer, ...]

    @classmethod
    def read(cls, directory: Path, device: torch.device) -> "Pooling":
        """From `modules.json`. Raises ValueError, naming it, for a step or a mode unknown here."""
        path = directory / "modules.json"
        steps = [(m["type"].rsplit(".", 1)[-1], directory / m["path"]) for m in _json(path)]
        if unknown := {step for step, _ in steps}.difference(STEPS):
            raise ValueError(f"{path} has steps unknown here: {', '.join(sorted(unknown))}")
        modes = [_mode(place / "config.json") for step, place in steps if step == "Pooling"]
        return cls(modes[0] if modes else "mean", tuple(_layers(steps, device)))

    @property
    def normalises(self) -> bool:
        """Whether vectors are of length one."""
        return self.layers[-1:] == (normalize,)

    def __call__(self, states: Tensor, batch: Padded) -> Tensor:
        """Vectors `[rows, size]` in float32."""
        vectors = self._pool(states.float(), batch)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors

    def _pool(self, states: Tensor, batch: Padded) -> Tensor:
        if self.mode == "cls":
            return states[:, 0]
        if self.mode == "lasttoken":
            return batch.last_of(states)
        weights = batch.mask[..., None].float()
        return (states * weights).sum(1) / weights.sum(1)


def _layers(steps: list[tuple[str, Path]], device: torch.device) -> Iterator[Layer]:
    for step, place in steps:
        if step == "Dense":
            yield _dense(place).to(device)
        elif step == "Normalize":
            yield normalize


def _dense(place: Path) -> nn.Module:
    """A linear layer and its activation, with the weights beside its configuration."""
    settings = _json(place / "config.json")
    if settings.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ValueError(f"{place} is a layer over single tokens, which is not possible here")
    weights = load_file(place / "model.safetensors")
    linear = nn.Linear(
        settings["in_features"], settings["out_features"], bias="linear.bias" in weights
    )
    linear.load_state_dict({name.removeprefix("linear."): w for name, w in weights.items()})
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    return nn.Sequential(linear, activation(name)).eval()


def _mode(path: Path) -> Mode:
    settings = _json(path)
    modes = [settings["pooling_mode"]] if "pooling_mode" in settings else _flags(settings)
    if len(modes) != 1 or modes[0] not in MODES:
        raise ValueError(f"{path} asks for pooling {modes}; one of {', '.join(MODES)} is possible")
    return cast(Mode, modes[0])


def _flags(settings: dict[str, object]) -> list[str]:
    """Modes in the older style: `"pooling_mode_mean_tokens": true`."""
    on = [key.removeprefix("pooling_mode_") for key, value in settings.items() if value is True]
    return [
        key.removesuffix("_tokens").removesuffix("_token") for key in on if key != "include_prompt"
    ]


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
