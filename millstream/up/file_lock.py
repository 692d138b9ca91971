"""File locks, which one process at a time can hold and the kernel releases when it dies."""

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool:
    """Lock a file for this process, without waiting; return False if another process has the lock.

    The lock ends when `file` is closed or the process dies.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
