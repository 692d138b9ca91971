"""Stall timer: seconds since a write buffer was last seen to shrink.

Pure: times are in seconds of any one clock.
"""


class StallTimer:
    """Measures for how long a write buffer has not shrunk; the caller passes its size."""

    def __init__(self, buffered_bytes: int, now: float) -> None:
        self.buffered_bytes, self._since = buffered_bytes, now

    def stalled_seconds(self, buffered_bytes: int, now: float) -> float:
        """Return for how many seconds the buffer has not shrunk, as of this check.

        They count from the last check that found fewer bytes than the check before it; if there is
        none, from the timer's creation. The result is 0 if this check finds fewer bytes.
        """
        if buffered_bytes < self.buffered_bytes:
            self._since = now
        self.buffered_bytes = buffered_bytes
        return now - self._since
