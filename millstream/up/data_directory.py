"""The data directory of `millstream up`: one owner at a time; logs, streams and the API key."""

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
    """Another `millstream up` runs in the same directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another `millstream up` uses {path}; name another one: --data-dir")
        self.path = path


@dataclass(frozen=True)
class DataDirectory:
    """A data directory that is ours until we end."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def nats_store(self) -> Path:
        """Where nats-server keeps its streams."""
        return self.path / "nats"

    def load_api_key(self) -> str:
        """The key that was kept, or a new one."""
        file = self.path / API_KEY_FILE
        return file.read_text().strip() if file.exists() else f"sk-{secrets.token_urlsafe(24)}"

    def save_api_key(self, key: str) -> None:
        """Leave it for clients and for later starts, in a file that its owner alone can read."""
        fresh = (self.path / API_KEY_FILE).with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", opener=_open_owner_only) as out:
            out.write(f"{key}\n")
        fresh.replace(self.path / API_KEY_FILE)


def _open_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def open_data_directory(data_dir: Path) -> Iterator[DataDirectory]:
    """The data directory, made if missing. Raises `DataDirectoryInUse` while another process has it."""
    home = DataDirectory(data_dir.expanduser().resolve())
    home.logs.mkdir(parents=True, exist_ok=True)
    home.nats_store.mkdir(exist_ok=True)
    with (home.path / "lock").open("w") as lock:
        if not try_lock(lock):
            raise DataDirectoryInUse(home.path)
        yield home
