"""Stall timer: seconds since a write buffer was last seen to shrink.

Pure: times are in seconds of any one clock.
"""


class StallTimer:
    """Measures a stall from the bytes in the buffer, which the caller passes at each check."""

    def __init__(self, buffered_bytes: int, now: float) -> None:
        self.buffered_bytes, self._since = buffered_bytes, now

    def stalled_seconds(self, buffered_bytes: int, now: float) -> float:
        """Return the seconds since the last check that found fewer bytes than the one before it.

        Before any check has found fewer they are counted from the timer's creation.
        """
        if buffered_bytes < self.buffered_bytes:
            self._since = now
        self.buffered_bytes = buffered_bytes
        return now - self._since
