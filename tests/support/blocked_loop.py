"""An event loop that stands still, as that of a process which the machine does not run."""

import time


def block_loop(seconds: float) -> None:
    """Run nothing in this thread for so long; what arrives meanwhile lies in the sockets."""
    time.sleep(seconds)
