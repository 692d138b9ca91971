"""The data directory of `millstream up`: logs, streams and secrets, with one owner at a time."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millstream.up.file_lock import try_lock
from streams.errors import MillstreamError

API_KEY_FILE = "api-key"
KEY_PEPPER_FILE = "key-pepper"
LOCK_FILE = "lock"
# What `up` makes there; files that replace others have the suffix `.new` in place of `.json`
_OWN_ENTRIES = {API_KEY_FILE, KEY_PEPPER_FILE, LOCK_FILE}
_OWN_ENTRIES |= {"logs", "nats", "broker", "state", "state.json"}
_OWNER_ONLY_UMASK, _OWNER_ONLY = 0o077, 0o700


class DataDirectoryInUse(MillstreamError):
    """Another running process owns the data directory `path`, so a second one must not use it."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another `millstream up` uses {path}; name another one: --data-dir")
        self.path = path


@dataclass(frozen=True)
class DataDirectory:
    """The data directory of a running `millstream up`: its logs, streams, API key and pepper.

    Obtained from `open_data_directory`, which ensures that no other process uses it. `path` is
    absolute.
    """

    path: Path

    @property
    def logs(self) -> Path:
        """The directory of the services' log files."""
        return self.path / "logs"

    @property
    def nats_store(self) -> Path:
        """The directory in which nats-server keeps its streams."""
        return self.path / "nats"

    @property
    def broker_keys(self) -> Path:
        """The directory of nats-server's keys and of the processes' credentials for it."""
        return self.path / "broker"

    @property
    def api_key_file(self) -> Path:
        """The file that holds the API key, readable by its owner alone."""
        return self.path / API_KEY_FILE

    def mint_key_pepper(self) -> Path:
        """Return the file with the pepper of managed keys, made at the first start.

        Only its owner can read it. It is never replaced: without it all managed keys are lost.
        """
        file = self.path / KEY_PEPPER_FILE
        if not file.exists():
            new_file = file.with_suffix(".new")
            new_file.unlink(missing_ok=True)
            with open(new_file, "x", opener=_open_owner_only) as out:
                out.write(f"{secrets.token_hex(32)}\n")
            new_file.replace(file)
        return file

    def load_api_key(self) -> str:
        """Return the saved API key, or a new random one if none is saved.

        A new key is not saved: without a call of `save_api_key` the next call returns another one.
        """
        return read_api_key(self.path) or f"sk-{secrets.token_urlsafe(24)}"

    def save_api_key(self, key: str) -> None:
        """Write `key` to the API key file, in place of an earlier one, for clients and restarts.

        Only the file's owner can read the file. The replacement is atomic: a reader sees the old
        key or the new one, never a part.
        """
        new_file = (self.path / API_KEY_FILE).with_suffix(".new")
        new_file.unlink(missing_ok=True)
        with open(new_file, "x", opener=_open_owner_only) as out:
            out.write(f"{key}\n")
        new_file.replace(self.path / API_KEY_FILE)


def read_api_key(data_dir: Path) -> str | None:
    """Return the API key kept in the data directory `data_dir`; None if none is kept there.

    `~` is expanded. Raises OSError if the file is there and cannot be read.
    """
    file = data_dir.expanduser() / API_KEY_FILE
    return (file.read_text().strip() or None) if file.exists() else None


def _open_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def open_data_directory(data_dir: Path) -> Iterator[DataDirectory]:
    """Lock the data directory for this process until the `with` block ends, and yield it.

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
    if names <= _OWN_ENTRIES:
        folders.append(directory.path)
    for folder in folders:
        folder.chmod(_OWNER_ONLY)
