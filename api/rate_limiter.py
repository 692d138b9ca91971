"""Rate limiter: so many events a second, and a burst at once.

Pure: times are in seconds of any one clock.
"""

import math


class RateLimiter:
    """Limits the rate of events, by the generic cell rate algorithm (ITU-T I.371).

    Behaves like a token bucket that holds `burst` events, but its whole state is one timestamp.
    """

    def __init__(self, per_second: float, burst: float | None = None) -> None:
        self.set_rate(per_second, burst)
        self._next_due = -math.inf  # when the next event is due if all come evenly

    def set_rate(self, per_second: float, burst: float | None = None) -> None:
        """Change the rate for later events; what was counted before stays.

        `burst` is how many events may come at once; None means those of one second.
        """
        self._interval = 1 / per_second
        self._tolerance = (per_second if burst is None else burst) * self._interval

    def reserve(self, now: float, count: int = 1) -> float:
        """Count `count` events; return the seconds that the caller must wait before the last one.

        0 means that they may happen now. They are counted in any case; this does not wait itself.
        """
        self._next_due = max(self._next_due, now - self._tolerance) + count * self._interval
        return max(0.0, self._next_due - now)
