"""state.json in the data directory: how other commands find what `millstream up` started."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class UpState(BaseModel):
    """Where a running `millstream up` can be reached. Stale once the process `pid` is gone."""

    model_config = ConfigDict(frozen=True)

    pid: int
    nats: str
    url: str

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def path(data_dir: Path) -> Path:
    return data_dir.expanduser() / "state.json"


def write(data_dir: Path, state: UpState) -> None:
    """Replace the state in one step: a reader sees the old one or the new one."""
    fresh = path(data_dir).with_suffix(".new")
    fresh.write_text(state.model_dump_json())
    fresh.replace(path(data_dir))


def read(data_dir: Path) -> UpState | None:
    """The state of a living `millstream up`, or None."""
    try:
        state = UpState.model_validate_json(path(data_dir).read_bytes())
    except (OSError, ValueError):
        return None
    return state if state.is_alive else None


def remove(data_dir: Path) -> None:
    path(data_dir).unlink(missing_ok=True)
