"""The manifest of a backup: which streams it has, in which files, with which checksums.

It is written last, so that a folder without one is no backup, or half of one.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from streams.errors import MillstreamError

MANIFEST = "manifest.json"
SNAPSHOT_SUFFIX, PARTIAL_SUFFIX = ".snapshot", ".partial"
_READ_BYTES = 2**20


class BackupUnusable(MillstreamError):
    """A folder is not a whole backup, or may not become one; `folder` is its path."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"{folder}: {reason}")
        self.folder = folder


class StreamBackup(BaseModel):
    """One stream of a backup: its file, and configuration and state as the server told them.

    `account` is the public key of the account that it was in, `$G` for a broker without accounts.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    account: str = "$G"
    file: str
    bytes: int
    sha256: str
    config: dict[str, Any]
    state: dict[str, Any]

    @property
    def last_sequence(self) -> int:
        """The stream's last sequence; messages of old sequences may have been removed."""
        return int(self.state.get("last_seq", 0))


class BackupManifest(BaseModel):
    """All streams of a broker, as they were when each was backed up.

    `cluster` is the name of the NATS cluster, empty for a single server. `left_out` has the reason
    for each stream that was not backed up.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    id: str
    made_at: str
    cluster: str
    server_version: str
    streams: tuple[StreamBackup, ...]
    left_out: dict[str, str]


def check_free_folder(folder: Path) -> None:
    """Make `folder` if it is missing; raise `BackupUnusable` unless a backup may be written there.

    It may be empty, or have the files of a backup that was interrupted, which are overwritten. A
    new folder is its owner's alone.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise BackupUnusable(folder, f"cannot be used ({error.strerror}): name another") from None
    if MANIFEST in names:
        raise BackupUnusable(folder, "is a backup already: name another folder, or remove it")
    if others := [n for n in names if not n.endswith((SNAPSHOT_SUFFIX, PARTIAL_SUFFIX))]:
        raise BackupUnusable(folder, f"has other files in it ({min(others)}): name another folder")


def write_manifest(folder: Path, manifest: BackupManifest) -> None:
    """Write the manifest, which makes the folder a backup, durably and all at once.

    Raises `BackupUnusable` if it cannot be written, as on a full disk.
    """
    new_file = folder / (MANIFEST + PARTIAL_SUFFIX)
    try:
        with open(new_file, "w", opener=open_owner_only) as out:
            out.write(manifest.model_dump_json(indent=2))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise BackupUnusable(
            folder, f"cannot be finished: {error.strerror}; make room and run the command again"
        ) from None
    new_file.replace(folder / MANIFEST)
    sync_folder(folder)


def open_owner_only(path: str, flags: int) -> int:
    """Open a file that only its owner may read once it is made: an `opener` of `open`."""
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> BackupManifest:
    """Return the manifest of a backup; raises `BackupUnusable` if there is no readable one."""
    try:
        return BackupManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise BackupUnusable(
            folder, f"has no {MANIFEST}: it is no backup, or one that was not finished"
        ) from None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise BackupUnusable(folder, f"its {MANIFEST} cannot be read, at {where}") from None


def verify_snapshot(folder: Path, stream: StreamBackup) -> None:
    """Raise `BackupUnusable` unless a stream's file is the one written; reads all of it."""
    path = folder / Path(stream.file).name
    if not path.exists():
        raise BackupUnusable(folder, f"{stream.file} is missing: this is half a backup")
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
            size += len(part)
    if (size, digest.hexdigest()) != (stream.bytes, stream.sha256):
        raise BackupUnusable(
            folder,
            f"{stream.file} has {size} bytes and sha256 {digest.hexdigest()}, written were "
            f"{stream.bytes} bytes with {stream.sha256}",
        )
