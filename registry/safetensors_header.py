"""Reads the header of a safetensors file: dtypes and shapes. Weights and torch are not needed.

Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON map, the weights).
"""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from registry.artifacts import ArtifactRefused

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
TensorShape = tuple[int, ...]


class TensorHeader(NamedTuple):
    """What a file's header says of one tensor; `dtype` is the format's name, such as `BF16`."""

    dtype: str
    shape: TensorShape


def read_tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the dtype and shape of every tensor in a safetensors file, by name.

    Reads the header only. Raises `ArtifactRefused` for a file that is not safetensors or cannot be
    read.
    """
    try:
        return {
            name: TensorHeader(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in _read_header(path).items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ArtifactRefused(path.name, f"is no safetensors file ({error!r})") from None


def read_shapes(path: Path) -> dict[str, TensorShape]:
    """Return the shape of every tensor in a safetensors file, by name; reads the header only.

    Raises `ArtifactRefused` for a file that is not safetensors or cannot be read.
    """
    return {name: tensor.shape for name, tensor in read_tensor_headers(path).items()}


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header: dict[str, dict[str, Any]] = json.loads(file.read(size))
    return header
