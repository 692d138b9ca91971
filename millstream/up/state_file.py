"""The file state.json in the data directory, by which commands find a running `millstream up`."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class UpState(BaseModel):
    """The content of the state file: process id and addresses of a `millstream up`.

    `nats` is the URL of nats-server, `url` that of the gateway and `admin` that of the admin
    service, all for clients on this machine; `nats_users` is the directory with credentials for
    nats-server, a file `CLASS.creds` for each class of users; `gateways` are the names of the
    gateways behind `url`, each with its log file. The state can be outdated: see `is_alive`.
    """

    model_config = ConfigDict(frozen=True)

    pid: int
    nats: str
    url: str
    admin: str = ""  # not of an earlier release
    nats_users: str = ""  # likewise
    gateways: tuple[str, ...] = ()  # likewise

    @property
    def is_alive(self) -> bool:
        """True if a process with this `pid` exists now.

        The process is not examined: after a crash and reuse of the id it may be another program.
        """
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
    """Write the state file in the data directory `data_dir`, replacing an earlier one atomically.

    A reader sees the old content or the new, never a part. The directory must exist.
    """
    new_file = path(data_dir).with_suffix(".new")
    new_file.write_text(state.model_dump_json())
    new_file.replace(path(data_dir))


def read(data_dir: Path) -> UpState | None:
    """Return the state of the `millstream up` that runs in the data directory `data_dir`.

    Returns None, and raises nothing, if there is no state file, if the file cannot be read or is
    invalid, or if its process no longer exists.
    """
    try:
        state = UpState.model_validate_json(path(data_dir).read_bytes())
    except (OSError, ValueError):
        return None
    return state if state.is_alive else None


def remove(data_dir: Path) -> None:
    """Delete the state file in the data directory `data_dir`, if there is one."""
    path(data_dir).unlink(missing_ok=True)
