"""Finds the safetensors files that transformers would load, and reads what their headers say."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from registry.artifact_verification import ArtifactRefused, read_json, weight_map
from registry.checkpoints.findings import Finding
from registry.checkpoints.safetensors_header import TensorHeader, Tensors, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


def read_weights(directory: Path, config: Mapping[str, Any]) -> tuple[Tensors, list[Finding]]:
    """Return the tensors that transformers would load from a model's directory, and warnings.

    It takes `model.safetensors`, else the files that the index names, or the file that
    `transformers_weights` in config.json names. Raises `ArtifactRefused` if there is none, or if a
    file is missing, damaged or not what the index says.
    """
    name = str(config.get("transformers_weights") or _default_name(directory))
    if not (directory / name).exists():
        raise ArtifactRefused(name, _why_absent(directory))
    if not name.endswith(".json"):
        return read_header(directory / name), []
    index = _read_index(directory / name)
    tensors = _merge_shards(directory, name, sorted(set(index.values())))
    if absent := sorted(index.keys() - tensors.keys()):
        reason = f"names {absent[0]} in {index[absent[0]]}, which has no such tensor"
        raise ArtifactRefused(name, reason + _and_more(absent) + "; fetch both files again")
    return tensors, list(_warn_of_index(directory, name, index, tensors))


def _default_name(directory: Path) -> str:
    """Return the name that transformers looks for: a single file before an index of shards."""
    is_sharded = (directory / INDEX).exists() or any(map(_SHARD.fullmatch, _names(directory)))
    return INDEX if is_sharded and not (directory / SINGLE).exists() else SINGLE


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.safetensors"))


def _why_absent(directory: Path) -> str:
    found = _names(directory)
    if not found:
        return "is missing, and there is no other .safetensors file; save the model's weights so"
    if shards := [name for name in found if _SHARD.fullmatch(name)]:
        return f"is missing, without which the {len(shards)} shards are not read; fetch it too"
    return f"is missing; a file called {found[0]} is not read: rename it"


def _read_index(path: Path) -> dict[str, str]:
    index = weight_map(read_json(path))
    if not index:
        raise ArtifactRefused(path.name, "has no weight_map from tensors to files")
    return {str(tensor): str(file) for tensor, file in index.items()}


def _merge_shards(directory: Path, index: str, files: list[str]) -> Tensors:
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        if not (directory / file).exists():
            raise ArtifactRefused(index, f"names {file}, which is missing; fetch it too")
        shard = read_header(directory / file)
        for name in shard.keys() & tensors.keys():
            _check_duplicate(name, tensors[name], shard[name])
        tensors |= shard
    return tensors


def _check_duplicate(name: str, first: TensorHeader, second: TensorHeader) -> None:
    """Raise `ArtifactRefused` if one name stands for two contents; which one loads is chance."""
    same_kind = (first.dtype, first.shape) == (second.dtype, second.shape)
    if not same_kind or first.read_bytes() != second.read_bytes():
        reason = f"{name} is in {first.path.name} too, with other values; remove the wrong one"
        raise ArtifactRefused(second.path.name, reason)


def _warn_of_index(
    directory: Path, name: str, index: Mapping[str, str], tensors: Tensors
) -> Iterator[Finding]:
    """Yield warnings of what the index leaves out, or says wrongly without consequences."""
    shards = {file for file in _names(directory) if _SHARD.fullmatch(file)}
    for file in sorted(shards - set(index.values())):
        yield Finding(file, f"is not in {name}, so it is not read", is_refusal=False)
    if moved := sorted(n for n, file in index.items() if tensors[n].path.name != file):
        reason = f"names {index[moved[0]]} for {moved[0]}, which is in "
        reason += tensors[moved[0]].path.name + _and_more(moved)
        yield Finding(name, reason, is_refusal=False)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
