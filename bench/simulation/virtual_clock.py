"""A virtual clock: calls functions in the order of their virtual times."""

import heapq
import itertools
from collections.abc import Callable

Act = Callable[[], None]


class VirtualClock:
    """Calls functions at virtual times, in seconds; those of one time in the order of setting."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.events = 0  # calls made so far
        self._due: list[tuple[float, int, Act]] = []
        self._order = itertools.count()

    def call_at(self, time: float, act: Act) -> None:
        """Call `act` at `time`, which must not be in the past."""
        assert time >= self.now, f"{time} is before {self.now}"
        heapq.heappush(self._due, (time, next(self._order), act))

    def call_later(self, seconds: float, act: Act) -> None:
        """Call `act` after so many seconds."""
        self.call_at(self.now + seconds, act)

    def call_every(self, seconds: float, act: Act) -> None:
        """Call `act` every so many seconds, the first time after as many."""

        def act_again() -> None:
            act()
            self.call_later(seconds, act_again)

        self.call_later(seconds, act_again)

    def run(self, until: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Run what is due up to `until`, or until `is_done()`, which is asked before each call."""
        while self._due and self._due[0][0] <= until and not is_done():
            self.now, _, act = heapq.heappop(self._due)
            self.events += 1
            act()
