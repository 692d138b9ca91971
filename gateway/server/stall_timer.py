"""How long a buffer has not become smaller. Pure: times are any one clock's, in seconds."""


class StallTimer:
    """Begins with the bytes in the buffer, and is told them again at each look."""

    def __init__(self, left: int, now: float) -> None:
        self.buffered_bytes, self._since = left, now

    def stalled_seconds(self, left: int, now: float) -> float:
        """Seconds since the last look at which there was less than at the one before."""
        if left < self.buffered_bytes:
            self._since = now
        self.buffered_bytes = left
        return now - self._since
