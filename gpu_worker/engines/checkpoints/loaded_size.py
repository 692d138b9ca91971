"""Says what a model's weights take on a device once they are loaded, from headers alone."""

from collections.abc import Iterable
from pathlib import Path

import torch

from gpu_worker.engines.precision import choose_dtype, loaded_weight_bytes
from registry.artifact_verification import ArtifactRefused, read_json_object
from registry.checkpoints.model_weights import read_model_weights


def loaded_bytes(directory: Path, files: Iterable[Path], engine: str, device: torch.device) -> int:
    """Return the bytes of a model's weights in `files` once an engine has loaded them.

    Weights of 8 bits count multiplied out, and files that are not read do not count. On a CPU the
    `transformers` engine packs an output head that is the embeddings, which takes its size again.
    Where the files cannot be read it is `loaded_weight_bytes`, since loading will report that.
    """
    dtype = choose_dtype(directory, device)
    try:
        config = read_json_object(directory / "config.json")
        weights = read_model_weights(directory, config)
    except (ArtifactRefused, OSError):
        return loaded_weight_bytes(files, dtype)
    packs_head = engine == "transformers" and device.type == "cpu"
    modules = (file for file in files if file.parent != directory)
    size = weights.loaded_bytes(dtype.itemsize, packs_head)
    return size + loaded_weight_bytes(modules, dtype)
