"""Notes when this process could not run: what a test then missed says nothing of the product.

Machines that run these tests share their cores, and all processes may stand still for seconds at a
time. A test that misses something then is run again, and the report of the run says so.
"""

import threading
import time
from collections import deque

STALL_SECONDS = 1.0
_TICK_SECONDS = 0.05


class MachineStalled(Exception):
    """A test failed while the machine stood still; it is run again."""


class StallWatch:
    """A thread that wakes up regularly, and notes when it could not."""

    def __init__(self) -> None:
        self._stalls: deque[tuple[float, float]] = deque(maxlen=1000)  # its end, and its seconds
        self._ticked_at = time.monotonic()
        threading.Thread(target=self._watch, name="stall-watch", daemon=True).start()

    def longest_since(self, began: float) -> float:
        """Seconds of the longest stall that ended after `began` (monotonic); 0 without any."""
        asleep = time.monotonic() - self._ticked_at  # the thread may not have run again yet
        stalls = [seconds for end, seconds in list(self._stalls) if end > began]
        return max([*stalls, asleep if asleep >= STALL_SECONDS else 0.0])

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - self._ticked_at >= STALL_SECONDS:
                self._stalls.append((now, now - self._ticked_at))
            self._ticked_at = now


def is_of_time(error: BaseException | None) -> bool:
    """Return True for a failed expectation, and for a timeout or what a library raises for one."""
    if isinstance(error, AssertionError):
        return True
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        error = error.__cause__
    return False
