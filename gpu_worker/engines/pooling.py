"""From token states to one vector, as a sentence-transformers directory describes it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

Mode = Literal["mean", "cls", "lasttoken"]
MODES = ("mean", "cls", "lasttoken")
STEPS = {"Transformer", "Pooling", "Normalize"}


@dataclass(frozen=True)
class Pooling:
    """How to pool `[rows, tokens, size]` states under a `[rows, tokens]` mask, right-padded."""

    mode: Mode = "mean"
    normalise: bool = True

    @classmethod
    def read(cls, directory: Path) -> "Pooling":
        """From `modules.json`; the mean, normalised, where there is none.

        Raises ValueError, naming it, for a step or a mode that is not known here.
        """
        path = directory / "modules.json"
        if not path.exists():
            return cls()
        steps = {m["type"].rsplit(".", 1)[-1]: m["path"] for m in json.loads(path.read_text())}
        if unknown := steps.keys() - STEPS:
            raise ValueError(f"{path} has steps unknown here: {', '.join(sorted(unknown))}")
        mode = _mode(directory / steps["Pooling"] / "config.json") if "Pooling" in steps else "mean"
        return cls(mode, "Normalize" in steps)

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Vectors `[rows, size]` in float32."""
        vectors = self._pool(states.float(), mask)
        return normalize(vectors) if self.normalise else vectors

    def _pool(self, states: Tensor, mask: Tensor) -> Tensor:
        if self.mode == "cls":
            return states[:, 0]
        if self.mode == "lasttoken":
            return states[torch.arange(len(states)), mask.sum(-1) - 1]
        weights = mask[..., None].float()
        return (states * weights).sum(1) / weights.sum(1)


def _mode(path: Path) -> Mode:
    settings = json.loads(path.read_text())
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
