"""The heartbeat's report on how many tokens requests have: seldom, and of a bounded size. Pure."""

from collections.abc import Callable
from math import inf

PROGRESS_REPORT_SECONDS = 0.2  # between two heartbeats that report progress
# Per heartbeat; ten thousand in the two seconds for which the dispatcher trusts a report
MAX_REPORTED_REQUESTS = 1024

TokenCounts = list[tuple[int, int]]  # sequence in WORK, tokens generated


class ProgressReporter:
    """Selects the requests to report in the next heartbeat; above 1,024 they take turns."""

    def __init__(self) -> None:
        self._at, self._next = -inf, 0

    def select_due(self, counts: Callable[[], TokenCounts], now: float) -> TokenCounts:
        """Return the token counts to report now: the next 1,024 at most.

        Empty if less than 0.2 s have passed since the last report; `counts` is not called then.
        """
        if now - self._at < PROGRESS_REPORT_SECONDS:
            return []
        all_counts = counts()
        first = self._next if self._next < len(all_counts) else 0
        self._at, self._next = now, first + MAX_REPORTED_REQUESTS
        return all_counts[first : self._next]
