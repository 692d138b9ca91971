"""File locks, which one process at a time can hold and the kernel releases when it dies."""

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool:
    """Try once to lock an open file for this process; return True if this process has the lock now.

    Returns False at once if another process holds the lock. The lock is released when `file` is
    closed or this process dies.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
