"""Reads and checks a safetensors file's header: no weights are read, no torch is needed.

Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON map, the weights).
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.artifact_verification import IS_LFS_POINTER, LFS_POINTER, ArtifactRefused

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "C64": 64, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_LENGTH_BYTES = 8
TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class TensorHeader:
    """One tensor, as a file's header has it; `start` and `end` are byte offsets in the file."""

    path: Path
    dtype: str  # one of DTYPE_BITS, or one that is not known here
    shape: TensorShape
    start: int
    end: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def read_bytes(self) -> bytes:
        """Return the tensor's content as it lies in the file."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)


Tensors = Mapping[str, TensorHeader]  # by name


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return what a safetensors file says of its tensors, by name; reads the header only.

    Raises `ArtifactRefused` for a file that cannot be read, is not safetensors, is shorter or
    longer than its header says, or has a tensor whose bytes are not those of its shape.
    """
    try:
        tensors = _parse(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ArtifactRefused(path.name, f"is no safetensors file ({error!r})") from None
    _check_size(path, tensors)
    return tensors


def read_shapes(path: Path) -> dict[str, TensorShape]:
    """Return the shape of every tensor in a safetensors file, by name; raises as `read_header`."""
    return {name: tensor.shape for name, tensor in read_header(path).items()}


def _parse(path: Path) -> dict[str, TensorHeader]:
    with path.open("rb") as file:
        begin = file.read(len(LFS_POINTER))
        if begin == LFS_POINTER:
            raise ArtifactRefused(path.name, IS_LFS_POINTER)
        (size,) = struct.unpack("<Q", begin[:_LENGTH_BYTES])
        if size > min(MAX_HEADER_BYTES, path.stat().st_size - _LENGTH_BYTES):
            raise ValueError(f"a header of {size} bytes in a file of {path.stat().st_size}")
        file.seek(_LENGTH_BYTES)
        entries = json.loads(file.read(size), object_pairs_hook=_unique_keys)
    data = _LENGTH_BYTES + size
    return {
        name: TensorHeader(
            path,
            str(entry["dtype"]),
            tuple(map(int, entry["shape"])),
            data + int(entry["data_offsets"][0]),
            data + int(entry["data_offsets"][1]),
        )
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(keys) > len(set(keys)):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} is named twice")
    return dict(pairs)


def _check_size(path: Path, tensors: dict[str, TensorHeader]) -> None:
    for name, tensor in tensors.items():
        bits = DTYPE_BITS.get(tensor.dtype, 0) * tensor.numel
        if tensor.dtype in DTYPE_BITS and 8 * (tensor.end - tensor.start) != bits:
            reason = f"{name} has {tensor.end - tensor.start} bytes, {tensor.dtype} of shape "
            raise ArtifactRefused(path.name, reason + f"{list(tensor.shape)} takes {bits // 8}")
    if not tensors:
        return
    size, needed = path.stat().st_size, max(tensor.end for tensor in tensors.values())
    if size != needed:
        state = (
            f"is cut off after {size:,} of {needed:,} bytes"
            if size < needed
            else f"has {size:,} bytes, which are more than the {needed:,} of its tensors"
        )
        raise ArtifactRefused(path.name, f"{state}: download it again")
