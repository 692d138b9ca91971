"""The file state.json in the data directory, by which commands find a running `millstream up`."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class UpState(BaseModel):
    """The process id and addresses of a running `millstream up`, as its state file has them.

    `nats` and `url` are for clients on this machine. The file is stale if no process has this
    `pid`.
    """

    model_config = ConfigDict(frozen=True)

    pid: int
    nats: str
    url: str

    @property
    def is_alive(self) -> bool:
        """True if a process with this `pid` exists, whoever owns it and whatever it runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def path(data_dir: Path) -> Path:
    """Return the path of the state file in the data directory `data_dir`; `~` is expanded."""
    return data_dir.expanduser() / "state.json"


def write(data_dir: Path, state: UpState) -> None:
    """Write the state file, replacing an earlier one; a reader sees either state as a whole."""
    new_file = path(data_dir).with_suffix(".new")
    new_file.write_text(state.model_dump_json())
    new_file.replace(path(data_dir))


def read(data_dir: Path) -> UpState | None:
    """Return the state of the `millstream up` that runs in this data directory.

    None if there is no state file, if it is not readable, or if its process is gone.
    """
    try:
        state = UpState.model_validate_json(path(data_dir).read_bytes())
    except (OSError, ValueError):
        return None
    return state if state.is_alive else None


def remove(data_dir: Path) -> None:
    """Delete the state file; a missing one is no error."""
    path(data_dir).unlink(missing_ok=True)
