"""Chooses the dtype that a model computes in, and tells the memory that its weights take in it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from registry.artifact_verification import ArtifactRefused, read_json
from registry.checkpoints.memory_use import loaded_bytes
from registry.checkpoints.safetensors_header import read_header

_COMPUTED_IN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# By the names of the safetensors format; all other dtypes are loaded as they are stored
_STORED_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_STORED_FLOATS |= {"F64": torch.float64}


def choose_dtype(directory: Path, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: the checkpoint's, or float32 where a CPU would emulate that.

    The checkpoint's is what config.json names, as `dtype` or `torch_dtype`, at the top or in
    `text_config`. Where it names none that can be computed in, it is the dtype of most weights in
    the safetensors files, and float32 if these say nothing either. A CPU emulates float16 always,
    and bfloat16 without AVX-512 or Arm's instructions for it: there a product of bfloat16 matrices
    takes up to six times as long as one of float32. Nothing is raised for files that cannot be
    read, since loading will report them.
    """
    dtype = next(_stored_dtypes(directory), torch.float32)
    emulated = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bfloat16_matmul())
    return torch.float32 if device.type == "cpu" and emulated else dtype


def loaded_weight_bytes(files: Iterable[Path], dtype: torch.dtype) -> int:
    """Return the bytes that the weights in safetensors `files` take once loaded in a dtype.

    That dtype is of floating point tensors; others keep their own. A file of another format, or
    that cannot be read, counts with its size.
    """
    return sum(_loaded_bytes(file, dtype) for file in files)


def has_bfloat16_matmul() -> bool:
    """Return True if oneDNN can pre-pack and multiply bfloat16 matrices on this CPU."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _loaded_bytes(file: Path, dtype: torch.dtype) -> int:
    stored = file.stat().st_size
    try:
        tensors = read_header(file)
    except ArtifactRefused:
        return stored
    header = stored - sum(tensor.end - tensor.start for tensor in tensors.values())
    return header + loaded_bytes(tensors, dtype.itemsize)


def _stored_dtypes(directory: Path) -> Iterator[torch.dtype]:
    """Yield the dtypes of a checkpoint that can be computed in, the one to be preferred first."""
    try:
        config = read_json(directory / "config.json")
    except (OSError, ArtifactRefused):
        config = None
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        if isinstance(part, dict):
            yield from _named_dtypes(part)
    yield from _dtypes_by_size(directory)


def _named_dtypes(config: dict[str, Any]) -> Iterator[torch.dtype]:
    for key in ("dtype", "torch_dtype"):
        name = config.get(key)
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if dtype in _COMPUTED_IN:
            yield dtype


def _dtypes_by_size(directory: Path) -> Iterator[torch.dtype]:
    """Yield the floating point dtypes of the weights, that of the most numbers first."""
    numbers: Counter[torch.dtype] = Counter()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            for tensor in read_header(file).values():
                if tensor.dtype in _STORED_FLOATS:
                    numbers[_STORED_FLOATS[tensor.dtype]] += tensor.numel
        except ArtifactRefused:
            continue
    yield from (dtype for dtype, _ in numbers.most_common())
