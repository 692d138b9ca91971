"""The file state.json in the data directory, by which commands find a running `millstream up`."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class UpState(BaseModel):
    """Addresses of NATS and gateway of a running `millstream up`; stale once its `pid` is gone."""

    model_config = ConfigDict(frozen=True)

    pid: int
    nats: str
    url: str

    @property
    def is_alive(self) -> bool:
        """True while a process with this `pid` exists, also another user's."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def path(data_dir: Path) -> Path:
    """Return the path of the state file in a data directory, with `~` expanded."""
    return data_dir.expanduser() / "state.json"


def write(data_dir: Path, state: UpState) -> None:
    """Replace the state file atomically: a reader sees the old state or the new one."""
    new_file = path(data_dir).with_suffix(".new")
    new_file.write_text(state.model_dump_json())
    new_file.replace(path(data_dir))


def read(data_dir: Path) -> UpState | None:
    """Return the state of a `millstream up` that is still running, or None."""
    try:
        state = UpState.model_validate_json(path(data_dir).read_bytes())
    except (OSError, ValueError):
        return None
    return state if state.is_alive else None


def remove(data_dir: Path) -> None:
    """Delete the state file, if there is one."""
    path(data_dir).unlink(missing_ok=True)
