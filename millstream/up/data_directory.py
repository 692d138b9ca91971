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


class DataDirectoryInUse(MillstreamError):
    """Another running `millstream up` uses the same data directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another `millstream up` uses {path}; name another one: --data-dir")
        self.path = path


@dataclass(frozen=True)
class DataDirectory:
    """A data directory that this process owns: logs, NATS's files and the API key."""

    path: Path

    @property
    def logs(self) -> Path:
        """The directory of the services' log files."""
        return self.path / "logs"

    @property
    def nats_store(self) -> Path:
        """The directory in which nats-server keeps its streams."""
        return self.path / "nats"

    def load_api_key(self) -> str:
        """Return the saved API key; if none was saved, a new random one, which is not saved yet."""
        file = self.path / API_KEY_FILE
        return file.read_text().strip() if file.exists() else f"sk-{secrets.token_urlsafe(24)}"

    def save_api_key(self, key: str) -> None:
        """Save the API key for clients and later starts, replacing an earlier one.

        Only the file's owner can read it. A reader sees the old key or the new one, never a part.
        """
        new_file = (self.path / API_KEY_FILE).with_suffix(".new")
        new_file.unlink(missing_ok=True)
        with open(new_file, "x", opener=_open_owner_only) as out:
            out.write(f"{key}\n")
        new_file.replace(self.path / API_KEY_FILE)


def _open_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def open_data_directory(data_dir: Path) -> Iterator[DataDirectory]:
    """Own the data directory for the time of the `with` block; create it if it is missing.

    Yields the directory with `~` expanded. Raises `DataDirectoryInUse` at once if another process
    owns it; this does not wait. A process that dies no longer owns it.
    """
    directory = DataDirectory(data_dir.expanduser().resolve())
    directory.logs.mkdir(parents=True, exist_ok=True)
    directory.nats_store.mkdir(exist_ok=True)
    with (directory.path / "lock").open("w") as lock:
        if not try_lock(lock):
            raise DataDirectoryInUse(directory.path)
        yield directory
