"""Rate limiter: so many events a second, and a burst at once.

Pure: times are in seconds of any one clock.
"""

import math


class RateLimiter:
    """Limits events by the generic cell rate algorithm (ITU-T I.371).

    Its state is one timestamp, instead of a token bucket and its refill.
    """

    def __init__(self, per_second: float, burst: float | None = None) -> None:
        self.set_rate(per_second, burst)
        self._next_due = -math.inf  # when the next event is due if all come evenly

    def set_rate(self, per_second: float, burst: float | None = None) -> None:
        """Set the rate from now on; `burst` is in events, by default those of one second."""
        self._interval = 1 / per_second
        self._tolerance = (per_second if burst is None else burst) * self._interval

    def reserve(self, now: float, count: int = 1) -> float:
        """Count `count` events; returns the seconds that the last one must wait, mostly 0."""
        self._next_due = max(self._next_due, now - self._tolerance) + count * self._interval
        return max(0.0, self._next_due - now)
