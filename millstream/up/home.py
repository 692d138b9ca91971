"""The data directory of `millstream up`: one owner at a time; logs, streams and the API key."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streams.errors import MillstreamError
from streams.locking import locked

KEY_FILE = "api-key"


class HomeTaken(MillstreamError):
    """Another `millstream up` runs in the same directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another `millstream up` uses {path}; name another one: --data-dir")
        self.path = path


@dataclass(frozen=True)
class Home:
    """A data directory that is ours until we end."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def store(self) -> Path:
        """Where nats-server keeps its streams."""
        return self.path / "nats"

    def api_key(self) -> str:
        """The key that was kept, or a new one."""
        file = self.path / KEY_FILE
        return file.read_text().strip() if file.exists() else f"sk-{secrets.token_urlsafe(24)}"

    def keep_api_key(self, key: str) -> None:
        """Leave it for clients and for later starts, in a file that its owner alone can read."""
        fresh = (self.path / KEY_FILE).with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", opener=_owner_only) as out:
            out.write(f"{key}\n")
        fresh.replace(self.path / KEY_FILE)


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def opened(data_dir: Path) -> Iterator[Home]:
    """The data directory, made if missing. Raises `HomeTaken` while another process has it."""
    home = Home(data_dir.expanduser().resolve())
    home.logs.mkdir(parents=True, exist_ok=True)
    home.store.mkdir(exist_ok=True)
    with (home.path / "lock").open("w") as lock:
        if not locked(lock):
            raise HomeTaken(home.path)
        yield home
