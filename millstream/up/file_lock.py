"""Files that one process at a time may own: the kernel lets go when it dies."""

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool:
    """Lock the file until it is closed; False while another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
