"""What a worker tells of its prefix cache: what is new, what is gone, at times everything. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from streams import prefix_hashes

MAX_HASHES = 2048  # the most recently used: 16 KB, told now and then
REPORT_SECONDS = 0.1
FULL_REPORT_SECONDS = 10.0  # a beat is at most once: by then whoever has missed one knows all again


@dataclass(frozen=True)
class CacheReport:
    """A part of a beat: packed marks; with `holds_only` there is nothing but `holds`."""

    holds: bytes = b""
    dropped: bytes = b""
    holds_only: bool = False


class CacheReporter:
    """Remembers what was told, so that beats are short."""

    def __init__(self) -> None:
        self._reported: frozenset[int] = frozenset()
        self._reported_at = self._fully_reported_at = float("-inf")

    def reset(self) -> None:
        """Somebody is new here and knows nothing."""
        self._reported_at = self._fully_reported_at = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it is worth looking at what is held."""
        return now - self._reported_at >= REPORT_SECONDS

    def report(self, held: Sequence[int], now: float) -> CacheReport:
        """What to tell, given the marks of all that is held, least recently used first."""
        before, self._reported = self._reported, frozenset(held[-MAX_HASHES:])
        self._reported_at = now
        if now - self._fully_reported_at >= FULL_REPORT_SECONDS:
            self._fully_reported_at = now
            return CacheReport(prefix_hashes.pack(self._reported), holds_only=True)
        return CacheReport(
            prefix_hashes.pack(self._reported - before), prefix_hashes.pack(before - self._reported)
        )
