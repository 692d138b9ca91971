"""Reads tensor shapes from a safetensors file's header: no weights are read, no torch is needed.

Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON map, the weights).
"""

import json
import struct
from pathlib import Path

from registry.artifacts import ArtifactRefused

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
TensorShape = tuple[int, ...]


def read_shapes(path: Path) -> dict[str, TensorShape]:
    """Return the shape of every tensor in a safetensors file, by name; reads the header only.

    Raises `ArtifactRefused` for a file that is not safetensors or cannot be read.
    """
    try:
        header = _read_header(path)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ArtifactRefused(path.name, f"is no safetensors file ({error!r})") from None


def _read_header(path: Path) -> dict[str, dict[str, list[int]]]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header: dict[str, dict[str, list[int]]] = json.loads(file.read(size))
    return header
