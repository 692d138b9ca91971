"""The data directory of `millstream up`: logs, streams and API key, with one owner at a time."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millstream.up.file_lock import try_lock
from streams.errors import MillstreamError

API_KEY_FILE = "api-key"
LOCK_FILE = "lock"
_OWN_ENTRIES = {API_KEY_FILE, LOCK_FILE, "logs", "nats", "state.json"}
_OWNER_ONLY_UMASK, _OWNER_ONLY = 0o077, 0o700


class DataDirectoryInUse(MillstreamError):
    """Another `millstream up` uses the same data directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another `millstream up` uses {path}; name another one: --data-dir")
        self.path = path


@dataclass(frozen=True)
class DataDirectory:
    """A data directory that this process owns."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def nats_store(self) -> Path:
        """The directory in which nats-server keeps its streams."""
        return self.path / "nats"

    @property
    def api_key_file(self) -> Path:
        """The file that holds the API key, readable by its owner alone."""
        return self.path / API_KEY_FILE

    def load_api_key(self) -> str:
        """Return the saved API key, or a new random one if none was saved."""
        file = self.path / API_KEY_FILE
        return file.read_text().strip() if file.exists() else f"sk-{secrets.token_urlsafe(24)}"

    def save_api_key(self, key: str) -> None:
        """Save the API key for clients and later starts, in a file that only its owner can read."""
        new_file = (self.path / API_KEY_FILE).with_suffix(".new")
        new_file.unlink(missing_ok=True)
        with open(new_file, "x", opener=_open_owner_only) as out:
            out.write(f"{key}\n")
        new_file.replace(self.path / API_KEY_FILE)


def _open_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def open_data_directory(data_dir: Path) -> Iterator[DataDirectory]:
    """Own the data directory for the time of the context; it is created if missing.

    Meanwhile files that this process and its children make are readable by their owner alone, as
    prompts and answers are among them. Raises `DataDirectoryInUse` while another process owns it.
    """
    directory = DataDirectory(data_dir.expanduser().resolve())
    umask = os.umask(_OWNER_ONLY_UMASK)
    try:
        directory.logs.mkdir(parents=True, exist_ok=True)
        directory.nats_store.mkdir(exist_ok=True)
        _close_to_others(directory)
        with (directory.path / LOCK_FILE).open("w") as lock:
            if not try_lock(lock):
                raise DataDirectoryInUse(directory.path)
            yield directory
    finally:
        os.umask(umask)


def _close_to_others(directory: DataDirectory) -> None:
    """Close the folders that earlier releases left open; not a folder that has others' files."""
    folders = [directory.logs, directory.nats_store]
    names = {name.removesuffix(".new") for name in os.listdir(directory.path)}
    if names <= _OWN_ENTRIES | {"state"}:
        folders.append(directory.path)
    for folder in folders:
        folder.chmod(_OWNER_ONLY)
