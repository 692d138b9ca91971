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
from registry.checkpoints.safetensors_header import Tensors, TensorShape, read_shapes
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


def check_vector_layers(directory: Path) -> Iterator[Finding]:
    """Yield what is wrong with the weights of a sentence encoder's layers behind the pooling."""
    for layer in read_vector_modules(json_reader(directory)).layers:
        try:
            check_layer_weights(directory, layer)
        except ArtifactRefused as refused:
            yield Finding(refused.path, refused.reason)


def check_layer_weights(directory: Path, layer: VectorLayer) -> None:
    """Raise `ArtifactRefused` unless a layer's file has the tensors that its config.json declares.

    These must be all, in the declared shapes; only the file's header is read.
    """
    expected, file = layer.read_tensor_shapes(), f"{layer.path}/{SINGLE}"
    if not expected:
        return
    if not (directory / file).exists():
        raise ArtifactRefused(file, f"is missing; fetch the weights of the {layer.kind} layer, too")
    try:
        found = read_shapes(directory / file)
    except ArtifactRefused as refused:
        raise ArtifactRefused(file, refused.reason) from None
    for name in sorted(expected.keys() | found.keys()):
        if reason := _difference(name, found.get(name), expected.get(name), layer.file):
            raise ArtifactRefused(file, reason)


def _difference(
    name: str, found: TensorShape | None, expected: TensorShape | None, config: str
) -> str | None:
    if found is None:
        return f"has no {name}, {config} asks for {list(expected or ())}; fetch the whole file"
    if expected is None:
        return f"has {name}, which {config} does not ask for"
    if found != expected:
        return f"{name} has the shape {list(found)}, {config} asks for {list(expected)}"
    return None
