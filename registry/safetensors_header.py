"""Reads the header of a safetensors file: dtypes and shapes. Weights and torch are not needed.

Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON map, the weights).
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from registry.artifact_verification import ArtifactRefused

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
    with _refusing(path):
        tensors, _ = _read_header(path)
        return {
            name: TensorHeader(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in tensors.items()
        }


def read_shapes(path: Path) -> dict[str, TensorShape]:
    """Return the shape of every tensor in a safetensors file, by name; reads the header only.

    Raises `ArtifactRefused` for a file that is not safetensors or cannot be read.
    """
    return {name: tensor.shape for name, tensor in read_tensor_headers(path).items()}


def check_length(path: Path) -> None:
    """Check that a safetensors file is as long as its header says; reads the header only.

    Raises `ArtifactRefused` for a file that is shorter, is not safetensors or cannot be read.
    """
    with _refusing(path):
        tensors, begin = _read_header(path)
        ends = (int(entry["data_offsets"][1]) for entry in tensors.values())
        wanted, found = begin + max(ends, default=0), path.stat().st_size
    if found < wanted:
        reason = f"is cut off after {found:,} of {wanted:,} bytes: download it again"
        raise ArtifactRefused(path.name, reason)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ArtifactRefused(path.name, f"is no safetensors file ({error!r})") from None


def _read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the header's entries of tensors, and the position at which their data begins."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header: dict[str, dict[str, Any]] = json.loads(file.read(size))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + size
