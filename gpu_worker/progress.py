"""How far requests have come, told in beats: seldom, and a bounded number at a time. Pure."""

from collections.abc import Callable
from math import inf

PROGRESS_SECONDS = 0.2  # from one beat that tells of it to the next
MOST_PROGRESS = 1024  # requests that one of them tells of: ten thousand in the two seconds trusted

Counts = list[tuple[int, int]]  # sequence in WORK, tokens generated


class Progress:
    """Takes turns among requests when there are more than a beat may tell of."""

    def __init__(self) -> None:
        self._at, self._next = -inf, 0

    def some(self, counts: Callable[[], Counts], now: float) -> Counts:
        """Of all counts those whose turn it is; none when the last beat has just told some."""
        if now - self._at < PROGRESS_SECONDS:
            return []
        whole = counts()
        first = self._next if self._next < len(whole) else 0
        self._at, self._next = now, first + MOST_PROGRESS
        return whole[first : self._next]
