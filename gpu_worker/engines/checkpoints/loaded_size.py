"""Says what a model's weights take on a device once they are loaded, from headers alone."""

from pathlib import Path

import torch

from gpu_worker.engines.precision import read_compute_dtype
from registry.artifacts import ArtifactRefused, read_json
from registry.checkpoints.model_weights import read_model_weights


def loaded_bytes(directory: Path, engine: str, device: torch.device) -> int:
    """Return the bytes of a model's weights once an engine has loaded them onto a device.

    On a CPU the `transformers` engine packs an output head that is the embeddings, which takes its
    size again. It is 0 if the files cannot be read; nothing is raised, since loading will report
    that.
    """
    try:
        weights = read_model_weights(directory, read_json(directory / "config.json"))
    except (ArtifactRefused, OSError, AttributeError):
        return 0
    packs_head = engine == "transformers" and device.type == "cpu"
    return weights.loaded_bytes(read_compute_dtype(directory, device).itemsize, packs_head)
