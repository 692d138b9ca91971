"""The heartbeat's report on how many tokens requests have: seldom, and of a bounded size. Pure."""

from collections.abc import Callable
from math import inf

PROGRESS_REPORT_SECONDS = 0.2  # between two heartbeats that report progress
# Per heartbeat; ten thousand in the two seconds for which the dispatcher trusts a report
MAX_REPORTED_REQUESTS = 1024

TokenCounts = list[tuple[int, int]]  # sequence in WORK, tokens generated


class ProgressReporter:
    """Selects the requests whose token counts the next heartbeat of a model server reports.

    Above 1,024 requests they take turns. `now` is in seconds of any one clock.
    """

    def __init__(self) -> None:
        self._at, self._next = -inf, 0

    def select_due(self, counts: Callable[[], TokenCounts], now: float) -> TokenCounts:
        """Return the token counts to report now: at most 1,024, those whose turn it is.

        `counts` returns those of all requests, as pairs of the request's sequence in the stream
        WORK and its generated tokens. If the last report was less than 0.2 s ago, the list is empty
        and `counts` is not called.
        """
        if now - self._at < PROGRESS_REPORT_SECONDS:
            return []
        all_counts = counts()
        first = self._next if self._next < len(all_counts) else 0
        self._at, self._next = now, first + MAX_REPORTED_REQUESTS
        return all_counts[first : self._next]
