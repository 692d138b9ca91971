"""Workers of an earlier `millstream up` in the same data directory that still run."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import structlog

from streams.base_settings import ENV_PREFIX

log = structlog.get_logger()

_CREDENTIALS = f"{ENV_PREFIX}NATS_CREDS="
_NAME = f"{ENV_PREFIX}ID="


def kill_leftovers(users: Path) -> list[str]:
    """Kill each worker whose credentials are in the directory `users`; return their names.

    The caller must own the data directory: its own workers would be killed, too. Processes of other
    users of the computer are not seen.
    """
    killed = []
    for process in Path("/proc").glob("[0-9]*"):
        if name := _worker_name(process, users):
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
                log.warning("leftover_killed", worker=name, pid=int(process.name))
                killed.append(name)
    return killed


def _worker_name(process: Path, users: Path) -> str | None:
    """Return the name of the worker that a process is; None for any other process."""
    try:
        variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended, or is another user's
        return None
    found = {v.removeprefix(_NAME) for v in variables if v.startswith(_NAME)}
    files = [Path(v.removeprefix(_CREDENTIALS)) for v in variables if v.startswith(_CREDENTIALS)]
    return next(iter(found), None) if [file.parent for file in files] == [users] else None
