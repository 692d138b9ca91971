"""The virtual clock: what is to happen, in the order of its time."""

import heapq
import itertools
from collections.abc import Callable

Act = Callable[[], None]


class VirtualClock:
    """Runs acts at their virtual times, in seconds; acts of one time in the order they were set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.events = 0  # that have run
        self._due: list[tuple[float, int, Act]] = []
        self._order = itertools.count()

    def call_at(self, time: float, act: Act) -> None:
        """Have `act` run at `time`, which is not in the past."""
        assert time >= self.now, f"{time} is before {self.now}"
        heapq.heappush(self._due, (time, next(self._order), act))

    def call_later(self, seconds: float, act: Act) -> None:
        self.call_at(self.now + seconds, act)

    def call_every(self, seconds: float, act: Act) -> None:
        """Have `act` run once each `seconds`, the first time in `seconds`."""

        def again() -> None:
            act()
            self.call_later(seconds, again)

        self.call_later(seconds, again)

    def run(self, until: float, idle: Callable[[], bool] = lambda: False) -> None:
        """Run what is due up to `until`, or until `idle()`; it is asked after each act."""
        while self._due and self._due[0][0] <= until and not idle():
            self.now, _, act = heapq.heappop(self._due)
            self.events += 1
            act()
