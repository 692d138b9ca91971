"""How long a buffer has not become smaller. Pure: times are any one clock's, in seconds."""


class Stall:
    """Begins with the bytes in the buffer, and is told them again at each look."""

    def __init__(self, left: int, now: float) -> None:
        self.left, self._since = left, now

    def seconds(self, left: int, now: float) -> float:
        """Seconds since the last look at which there was less than at the one before."""
        if left < self.left:
            self._since = now
        self.left = left
        return now - self._since
