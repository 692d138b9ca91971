"""Checks a model's directory from its headers and JSON files: what `models add` would refuse."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.artifacts import ArtifactRefused
from registry.checkpoints.completeness import check_tensors
from registry.checkpoints.findings import Finding
from registry.checkpoints.memory_use import loaded_bytes
from registry.checkpoints.quantization import ScaledWeight, scaled_weights, unused_tensors
from registry.checkpoints.safetensors_header import TensorHeader, read_shapes
from registry.checkpoints.weight_files import SINGLE, read_weights
from registry.models import EngineKind


@dataclass(frozen=True)
class ModelWeights:
    """A model directory's tensors by name, those that are scaled, and warnings about its files."""

    tensors: Mapping[str, TensorHeader]
    scaled: Mapping[str, ScaledWeight]
    warnings: list[Finding] = field(default_factory=list)

    @property
    def unused(self) -> set[str]:
        """Names of the tensors that are no weights, such as scales."""
        return unused_tensors(self.scaled, self.tensors)

    def loaded_bytes(self, itemsize: int) -> int:
        """Return the bytes of the weights once loaded in a dtype of `itemsize` bytes."""
        return loaded_bytes(self.tensors, itemsize, self.scaled, self.unused)


def read_model_weights(directory: Path, config: Mapping[str, Any]) -> ModelWeights:
    """Return what the weight files of a model's directory hold; reads headers only.

    Raises `ArtifactRefused` for files that are missing, damaged or quantised by a method that
    cannot be run.
    """
    tensors, warnings = read_weights(directory, config)
    return ModelWeights(tensors, scaled_weights(directory, config, tensors), warnings)


def check_weights(
    directory: Path, config: Mapping[str, Any], engine: EngineKind
) -> Iterator[Finding]:
    """Yield what is wrong with the weights of a model's directory for an engine."""
    try:
        weights = read_model_weights(directory, config)
    except ArtifactRefused as refused:
        yield Finding(refused.path, refused.reason)
        return
    yield from weights.warnings
    tensors = {n: t for n, t in weights.tensors.items() if n not in weights.unused}
    yield from check_tensors(config, engine, tensors)


def check_module(directory: Path, path: str, inputs: int, outputs: int) -> Iterator[Finding]:
    """Yield what is wrong with the weights of a sentence encoder's dense module at `path`."""
    file = f"{path}/{SINGLE}"
    if not (directory / file).exists():
        yield Finding(file, "is missing; fetch the dense module's weights, too")
        return
    try:
        shapes = read_shapes(directory / file)
    except ArtifactRefused as refused:
        yield Finding(file, refused.reason)
        return
    found = shapes.get("linear.weight")
    if found != (outputs, inputs):
        reason = f"linear.weight has the shape {list(found)}" if found else "has no linear.weight"
        yield Finding(file, f"{reason}, {path}/config.json asks for [{outputs}, {inputs}]")
