"""File locks, which one process at a time can hold and the kernel releases when it dies."""

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool:
    """Lock the file until it is closed; return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
