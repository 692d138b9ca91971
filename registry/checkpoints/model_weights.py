"""Checks a model's directory from its headers and JSON files: what `models add` would refuse."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.artifact_verification import ArtifactRefused, json_reader
from registry.checkpoints.completeness import check_tensors
from registry.checkpoints.findings import Finding
from registry.checkpoints.memory_use import loaded_bytes, tied_head_elements
from registry.checkpoints.quantization import ScaledWeight, scaled_weights, unused_tensors
from registry.checkpoints.safetensors_header import Tensors, read_shapes
from registry.checkpoints.weight_files import SINGLE, read_weights
from registry.models import EngineKind
from registry.sentence_encoder import VectorLayer, read_vector_modules


@dataclass(frozen=True)
class ModelWeights:
    """A model directory's tensors by name, those that are scaled, and warnings about its files."""

    tensors: Tensors
    scaled: Mapping[str, ScaledWeight]
    warnings: list[Finding] = field(default_factory=list)

    @property
    def unused(self) -> set[str]:
        """Names of the tensors that are no weights, such as scales."""
        return unused_tensors(self.scaled, self.tensors)

    def loaded_bytes(self, itemsize: int, separate_head: bool = False) -> int:
        """Return the bytes of the weights once loaded in a dtype of `itemsize` bytes.

        With `separate_head` an output head that is the embeddings counts once more, as where it is
        packed for a CPU.
        """
        size = loaded_bytes(self.tensors, itemsize, self.scaled, self.unused)
        return size + (tied_head_elements(self.tensors) * itemsize if separate_head else 0)


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
    unused = weights.unused
    tensors = {name: each for name, each in weights.tensors.items() if name not in unused}
    yield from check_tensors(config, engine, tensors)


def check_dense_modules(directory: Path) -> Iterator[Finding]:
    """Yield what is wrong with the weights of the dense modules of a sentence encoder."""
    for layer in read_vector_modules(json_reader(directory)).layers:
        if layer.kind == "Dense":
            yield from _check_dense(directory, layer)


def _check_dense(directory: Path, layer: VectorLayer) -> Iterator[Finding]:
    file = f"{layer.path}/{SINGLE}"
    if not (directory / file).exists():
        yield Finding(file, "is missing; fetch the dense module's weights, too")
        return
    try:
        found = read_shapes(directory / file).get("linear.weight")
    except ArtifactRefused as refused:
        yield Finding(file, refused.reason)
        return
    shape = [layer.settings.get(key) for key in ("out_features", "in_features")]
    if found is None or list(found) != shape:
        has = f"linear.weight has the shape {list(found)}" if found else "has no linear.weight"
        yield Finding(file, f"{has}, {layer.path}/config.json asks for {shape}")
