"""The heartbeat's report on a worker's prefix cache: what was added and dropped since. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from streams import prefix_hashes

MAX_HASHES = 2048  # the most recently used; a full report of them is 16 KB
REPORT_SECONDS = 0.1  # between two reports
# Between two full reports. Heartbeats may be lost: a full report mends what a reader has missed.
FULL_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class CacheReport:
    """The part of a heartbeat that tells which prompt prefixes a worker's engine has cached.

    `holds` are the packed hashes of prefixes that the cache has gained since the last report,
    `dropped` those of prefixes that it has lost. With `holds_only` the report is full: `holds` is
    all that the cache has.
    """

    holds: bytes = b""
    dropped: bytes = b""
    holds_only: bool = False


class CacheReporter:
    """Builds one model server's cache reports; most have only the changes since the last one.

    `now` is in seconds of any one clock.
    """

    def __init__(self) -> None:
        self._reported: frozenset[int] = frozenset()
        self._reported_at = self._fully_reported_at = float("-inf")

    def reset(self) -> None:
        """Make the next report due at once and full, as a new dispatcher leader needs it."""
        self._reported_at = self._fully_reported_at = float("-inf")

    def is_due(self, now: float) -> bool:
        """Return True if no report was made in the last 0.1 s, or none since `reset`."""
        return now - self._reported_at >= REPORT_SECONDS

    def report(self, cached: Sequence[int], now: float) -> CacheReport:
        """Return the next report, and remember it as sent.

        `cached` are all prefix hashes in the cache, least recently used first; only the last 2,048
        count. The report is full if there was no full one for ten seconds or since `reset`, else it
        has the changes since the last report.
        """
        before, self._reported = self._reported, frozenset(cached[-MAX_HASHES:])
        self._reported_at = now
        if now - self._fully_reported_at >= FULL_REPORT_SECONDS:
            self._fully_reported_at = now
            return CacheReport(prefix_hashes.pack(self._reported), holds_only=True)
        return CacheReport(
            prefix_hashes.pack(self._reported - before), prefix_hashes.pack(before - self._reported)
        )
