"""So many a second, and a burst at once. Pure: times are any one clock's, in seconds."""

import math


class RateLimiter:
    """The generic cell rate algorithm (ITU-T I.371): a time instead of a bucket and its refill."""

    def __init__(self, per_second: float, burst: float | None = None) -> None:
        self.set_rate(per_second, burst)
        self._next_due = -math.inf  # when the next one would come if all came evenly

    def set_rate(self, per_second: float, burst: float | None = None) -> None:
        """Another pace from now on; without `burst` that of one second."""
        self._interval = 1 / per_second
        self._tolerance = (per_second if burst is None else burst) * self._interval

    def reserve(self, now: float, count: int = 1) -> float:
        """Count so many; returns how long the last must wait to be in time, mostly 0."""
        self._next_due = max(self._next_due, now - self._tolerance) + count * self._interval
        return max(0.0, self._next_due - now)
