"""The rate of a number that its owner only counts up, and begins anew when it is replaced. Pure."""

from collections import deque

STEPS = 30  # of a window: no two values that are kept lie closer than half of one


class CounterRate:
    """Several counters of one owner, and how fast they have grown in the last seconds.

    An owner that has been replaced counts from 0: a smaller first counter shows it, and what was
    counted before the first value that was heard of it is left out. Times are seconds of one clock.
    """

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._values: deque[tuple[float, tuple[float, ...]]] = deque()

    def record(self, now: float, *counters: float) -> None:
        """Take the values of all counters as they were heard at `now`."""
        if self._values and counters[0] < self._values[-1][1][0]:
            self._values.clear()
        if len(self._values) > 1 and now - self._values[-2][0] < self._window_seconds / STEPS:
            self._values.pop()  # the newest one alone lies closer to the one before it
        self._values.append((now, counters))
        while len(self._values) > 2 and self._values[1][0] <= now - self._window_seconds:
            self._values.popleft()

    @property
    def last_at(self) -> float:
        """Time of the last values, of which there must be some."""
        return self._values[-1][0]

    @property
    def growth(self) -> tuple[float, ...] | None:
        """Growth of each counter over the window; None before the second value."""
        if len(self._values) < 2:
            return None
        (_, first), (_, last) = self._values[0], self._values[-1]
        return tuple(late - early for early, late in zip(first, last, strict=True))

    @property
    def per_second(self) -> tuple[float, ...] | None:
        """Growth of each counter per second; None before the second value."""
        growth = self.growth
        seconds = self._values[-1][0] - self._values[0][0] if growth else 0.0
        return tuple(each / seconds for each in growth) if growth and seconds > 0 else None
