"""Multiplies out weights of 8 bits (fp8, int8) with their scales while transformers loads them.

transformers takes a state dict of lazy tensors in place of a directory: each is read and multiplied
out in float32 when its turn comes, in the loader's own threads, and then cast to the dtype in which
the model computes. Renaming, merging of experts and tensor parallel parts work as for any file.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from registry.artifact_verification import read_json
from registry.checkpoints.model_weights import ModelWeights, read_model_weights
from registry.checkpoints.quantization import ScaledWeight


class ScaledTensor:
    """A weight of 8 bits in a file, which reads as the product with its scales, in float32."""

    def __init__(self, weight: Any, scale: Tensor, scaled: ScaledWeight) -> None:
        self._weight, self._scale, self._scaled = weight, scale, scaled

    def get_shape(self) -> list[int]:
        """Return the weight's shape, which multiplying out does not change."""
        return list(self._weight.get_shape())

    def get_dtype(self) -> str:
        """Return the dtype in which the weight reads, by safetensors' name."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the weight, multiplied out; the whole weight is read for it."""
        return multiply_out(self._weight[...], self._scale, self._scaled.block)[index]


def multiply_out(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return a weight times its scales, in float32.

    `scale` has one number for each block of `block` rows and columns in the last two dimensions, of
    which the last one of a row or column may be cut. Without `block` it has one number.
    """
    scale = scale.to(torch.float32)
    if block is None:
        return weight.to(torch.float32) * scale.reshape(())
    rows, columns = weight.shape[-2:]
    grid = scale.reshape(*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    spread = grid.repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.to(torch.float32) * spread.repeat_interleave(block[1], -1)[..., :columns]


def weights_source(
    auto_class: type[Any], directory: Path, config: PreTrainedConfig
) -> tuple[type[Any], dict[str, Any]]:
    """Return a class and the arguments with which its `from_pretrained` loads a directory.

    These are `auto_class` and the directory or, where weights are to be multiplied out or scales
    left out, the model's own class and a state dict, since automatic classes take no state dict. A
    declared quantisation is taken out of `config`: no loaded weight is quantised any more. Raises
    `ArtifactRefused` for files that cannot be read and for a method that cannot be run.
    """
    weights = read_model_weights(directory, read_json(directory / "config.json"))
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    if not weights.scaled and not weights.unused:
        return auto_class, {"pretrained_model_name_or_path": directory, "config": config}
    with torch.device("meta"):
        model = auto_class.from_config(config)
    return type(model), {
        "pretrained_model_name_or_path": None,
        "config": model.config,
        "state_dict": read_state_dict(weights),
    }


def read_state_dict(weights: ModelWeights) -> dict[str, Any]:
    """Return a checkpoint's tensors, read when they are asked for; scales are not among them."""
    paths = {tensor.path for tensor in weights.tensors.values()}
    files: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in paths}
    unused = weights.unused
    found: dict[str, Any] = {}
    for name, tensor in weights.tensors.items():
        if name in unused:
            continue
        found[name] = files[tensor.path].get_slice(name)
        if scaled := weights.scaled.get(name):
            scale = files[weights.tensors[scaled.scale].path].get_tensor(scaled.scale)
            found[name] = ScaledTensor(found[name], scale, scaled)
    return found


def read_generation_config(model: PreTrainedModel, directory: Path) -> None:
    """Set the generation settings of a directory, which a state dict comes without."""
    if model.can_generate() and (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(  # a directory  # nosec B615
            directory, local_files_only=True
        )
