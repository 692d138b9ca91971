"""How far requests have come, told in beats: seldom, and a bounded number at a time. Pure."""

from collections.abc import Callable
from math import inf

PROGRESS_REPORT_SECONDS = 0.2  # from one beat that tells of it to the next
# Requests that one of them tells of: ten thousand in the two seconds trusted
MAX_REPORTED_REQUESTS = 1024

TokenCounts = list[tuple[int, int]]  # sequence in WORK, tokens generated


class ProgressReporter:
    """Takes turns among requests when there are more than a beat may tell of."""

    def __init__(self) -> None:
        self._at, self._next = -inf, 0

    def select_due(self, counts: Callable[[], TokenCounts], now: float) -> TokenCounts:
        """Of all counts those whose turn it is; none when the last beat has just told some."""
        if now - self._at < PROGRESS_REPORT_SECONDS:
            return []
        whole = counts()
        first = self._next if self._next < len(whole) else 0
        self._at, self._next = now, first + MAX_REPORTED_REQUESTS
        return whole[first : self._next]
