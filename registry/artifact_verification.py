"""Artifacts, the files of a model version: checked against a list of types and hashed with sha256.

A version consists of files that cannot run code: safetensors, GGUF, JSON and tokeniser files. All
others, such as pickles and scripts, are no part of it, and no engine reads them. Symbolic links,
and files that lead to others outside the version, are refused by name.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from streams.errors import MillstreamError

ALLOWED = frozenset({".safetensors", ".gguf", ".json", ".txt", ".jinja", ".model", ".tiktoken"})
PICKLES = frozenset(
    {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy", ".joblib", ".dill", ".mar"}
)
IGNORED = frozenset({".md", ".rst", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf"})
_READ_BY_TRANSFORMERS = ("config.json", "generation_config.json", "model.safetensors.index.json")
IGNORED_STEMS = ("readme", "license", "licence", "notice", "use_policy", "usage_policy")
THREADS = min(8, os.cpu_count() or 1)
SHORT_DIGEST = 12
LFS_POINTER = b"version https://git-lfs"  # begins a text in place of a file not fetched
IS_LFS_POINTER = "is a pointer of Git LFS to a file: run `git lfs pull`"
ReadJson = Callable[[str], Any]  # content of a JSON file, by relative path; None if it is missing


class ArtifactError(MillstreamError):
    """A file of a model version is at fault; `path` is relative to the version's directory."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class ArtifactRefused(ArtifactError):
    """A model version must not have this file, or the file lacks something that it must contain."""


class ArtifactChanged(ArtifactError):
    """The files are not those that were registered; `path` is the first one that differs."""


def hash_files(directory: Path) -> dict[str, str]:
    """Return the sha256 (hex) of every file of a model version, by relative path in order of path.

    Files that no engine reads are left out. Raises `ArtifactRefused` for what must not be there,
    such as a symbolic link. Reads every byte: call it in a thread.
    """
    root, paths = _resolve_root(directory), list_files(directory)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="sha256") as threads:
        return dict(zip(paths, threads.map(_sha256, [root / path for path in paths]), strict=True))


def list_files(directory: Path) -> list[str]:
    """Return the relative paths of the files of a model version, in order; reads only the JSON.

    Files that no engine reads are left out. Raises `ArtifactRefused` as `hash_files` does.
    """
    root = _resolve_root(directory)
    paths = sorted(filter(_is_of_version, _walk_files(root)))
    for path in paths:
        if not (root / path).is_file():  # reading a pipe would wait for its writer
            raise ArtifactRefused(path, "is no regular file")
        if path.lower().endswith(".json"):
            _check_json(root, path)
    return paths


def list_unread_files(directory: Path) -> list[str]:
    """Return the relative paths of files that no engine reads, in order, without documentation."""
    paths = sorted(_walk_files(_resolve_root(directory)))
    return [path for path in paths if not _is_of_version(path) and not _is_documentation(path)]


def verify_files(directory: Path, files: Mapping[str, str]) -> None:
    """Check that a directory holds exactly `files`, given as sha256 (hex) by relative path.

    Files that no engine reads may differ. Raises `ArtifactChanged` for the first file that is
    missing, new or changed, and `ArtifactRefused` for a file that must not be there. Reads every
    byte: call it in a thread.
    """
    for path in files:
        _check_relative(path)
    found = hash_files(directory)
    for path in sorted(found.keys() | files.keys()):
        _compare(path, files.get(path), found.get(path))


def read_verified(directory: Path, path: str, sha256: str) -> bytes:
    """Return the content of a registered file; `path` is relative to `directory`.

    Raises `ArtifactChanged` if the file is missing or no longer has this sha256 (hex), and
    `ArtifactRefused` if the path leads out of the directory or to a hidden file.
    """
    _check_relative(path)
    try:
        content = (directory / path).read_bytes()
    except OSError:
        raise ArtifactChanged(path, "is missing") from None
    _compare(path, sha256, hashlib.sha256(content).hexdigest())
    return content


def combine_digests(files: Mapping[str, str]) -> str:
    """Return one sha256 (hex) over all files' digests and paths, whatever their order."""
    lines = "".join(f"{files[path]}  {path}\n" for path in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raises `ArtifactRefused` if it is not JSON in UTF-8.

    Raises OSError if the file cannot be read.
    """
    content = path.read_bytes()
    if content.startswith(LFS_POINTER):
        raise ArtifactRefused(path.name, IS_LFS_POINTER)
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ArtifactRefused(path.name, f"is not JSON ({error})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises `ArtifactRefused` if the file holds anything else.

    Raises OSError if the file cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ArtifactRefused(path.name, "is not a JSON object")
    return content


def json_reader(directory: Path) -> ReadJson:
    """Return a function that reads a JSON file of `directory`; its errors are those of `read_json`.

    It returns None for a file that is missing.
    """

    def read(path: str) -> Any:
        return read_json(directory / path) if (directory / path).exists() else None

    return read


def read_object(read: ReadJson, path: str) -> dict[str, Any]:
    """Return the object in a JSON file that `read` reads; empty if the file is missing or null.

    Raises `ArtifactRefused` if the file holds anything else.
    """
    content = read(path)
    if content is not None and not isinstance(content, dict):
        raise ArtifactRefused(path, "is not a JSON object")
    return content or {}


def positive(value: object) -> int | None:
    """Return a value of a JSON file if it is a whole number above 0 and of 31 bits; else None."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value < 2**31 else None


def weight_map(index: Any) -> dict[str, Any]:
    """Return the map from tensor to file in a sharded model's index; empty if there is none."""
    weights = index.get("weight_map") if isinstance(index, dict) else None
    return weights if isinstance(weights, dict) else {}


def begins_with(path: Path, prefix: bytes) -> bool:
    """Return whether a file's first bytes are these; reads no more of it."""
    with path.open("rb") as file:
        return file.read(len(prefix)) == prefix


def _compare(path: str, registered: str | None, found: str | None) -> None:
    if found is None:
        raise ArtifactChanged(path, "is missing")
    if registered is None:
        raise ArtifactChanged(path, "was not there when the version was registered")
    if found != registered:
        raise ArtifactChanged(path, f"has sha256 {found}, registered was {registered}")


def _resolve_root(directory: Path) -> Path:
    if not directory.is_dir():
        raise ArtifactRefused(str(directory), "is not a directory")
    return directory.resolve()


def _walk_files(root: Path, below: str = "") -> Iterator[str]:
    """Yield relative paths of all files that are not hidden; raises for a symbolic link."""
    for entry in sorted(os.scandir(root / below), key=lambda e: e.name):
        path = f"{below}{entry.name}"
        if entry.is_symlink():
            raise ArtifactRefused(path, "is a symbolic link; copy the files themselves (cp -rL)")
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk_files(root, path + "/")
        else:
            yield path


def _is_of_version(path: str) -> bool:
    """Return whether a file belongs to a version, by its name."""
    return PurePosixPath(path.lower()).suffix in ALLOWED and not _is_documentation(path)


def _is_documentation(path: str) -> bool:
    name = PurePosixPath(path.lower())
    return name.suffix in IGNORED or name.name.startswith(IGNORED_STEMS)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_json(root: Path, path: str) -> None:
    """Raise `ArtifactRefused` for a file that names code, or others that are not of the version.

    Also for one that begins with a byte order mark, if transformers would have to read it.
    """
    content = read_json(root / path)
    if path in _READ_BY_TRANSFORMERS and begins_with(root / path, codecs.BOM_UTF8):
        raise ArtifactRefused(
            path,
            "begins with a byte order mark, which transformers does not read; remove its three "
            f"bytes: sed -i '1s/^\\xef\\xbb\\xbf//' {path}",
        )
    named = list(weight_map(content).values())
    if path == "config.json" and isinstance(content, dict) and content.get("transformers_weights"):
        named.append(content["transformers_weights"])
    for file in map(str, named):
        _check_relative(file)
        if not _is_of_version(file):
            raise ArtifactRefused(path, f"names {file}, which is no .safetensors file")
    if PurePosixPath(path).name == "modules.json":
        _check_modules(path, content)


def _check_modules(path: str, content: Any) -> None:
    if not isinstance(content, list) or not all(isinstance(module, dict) for module in content):
        raise ArtifactRefused(path, "is not a list of modules")
    for module in content:
        kind = str(module.get("type"))
        if not kind.startswith("sentence_transformers."):
            raise ArtifactRefused(path, f"asks for the module {kind!r}, which is not known")
        _check_relative(str(module.get("path", "")))


def _check_relative(path: str) -> None:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in path or "\0" in path:
        raise ArtifactRefused(path, "leads out of the directory")
    if any(part.startswith(".") for part in parts.parts):
        raise ArtifactRefused(path, "is hidden, so it is no part of the version")
