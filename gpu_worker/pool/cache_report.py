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
    """The cache fields of a heartbeat, as packed prefix hashes.

    `holds` are hashes that the cache has gained since the last report, `dropped` those that it has
    lost. With `holds_only` the report is full: `holds` is all that is reported as cached.
    """

    holds: bytes = b""
    dropped: bytes = b""
    holds_only: bool = False


class CacheReporter:
    """Builds cache reports of changes alone, by remembering what was reported last."""

    def __init__(self) -> None:
        self._reported: frozenset[int] = frozenset()
        self._reported_at = self._fully_reported_at = float("-inf")

    def reset(self) -> None:
        """Make the next report due at once and full, as a new dispatcher leader needs it."""
        self._reported_at = self._fully_reported_at = float("-inf")

    def is_due(self, now: float) -> bool:
        """Return whether 0.1 s have passed since the last report; `now` is in seconds."""
        return now - self._reported_at >= REPORT_SECONDS

    def report(self, cached: Sequence[int], now: float) -> CacheReport:
        """Return the report due now, given all cached prefix hashes, least recently used first.

        It is full every ten seconds and after `reset`, else it has the changes since the last one.
        """
        before, self._reported = self._reported, frozenset(cached[-MAX_HASHES:])
        self._reported_at = now
        if now - self._fully_reported_at >= FULL_REPORT_SECONDS:
            self._fully_reported_at = now
            return CacheReport(prefix_hashes.pack(self._reported), holds_only=True)
        return CacheReport(
            prefix_hashes.pack(self._reported - before), prefix_hashes.pack(before - self._reported)
        )
