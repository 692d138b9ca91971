"""The times of one attempt: its stages, and its end."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from streams.headers import Envelope

_MEASURED_TOKENS = 2


@dataclass
class StageTimer:
    """When an attempt reached its stages, in epoch milliseconds."""

    now: Callable[[], float]  # epoch seconds
    pulled_at_ms: float = 0.0
    first_output_at_ms: float = 0.0
    _first_output_monotonic: float = 0.0  # the first output, by the monotonic clock

    def __post_init__(self) -> None:
        self.pulled_at_ms = self.now() * 1000

    def mark_first_output(self) -> None:
        """Its first output was made."""
        self.first_output_at_ms, self._first_output_monotonic = self.now() * 1000, time.monotonic()

    def estimate_seconds(self, tokens: int, made: int) -> float | None:
        """For so many more tokens at its pace so far; None while that cannot be told."""
        if not self.first_output_at_ms or (tokens > 0 and made < _MEASURED_TOKENS):
            return None
        return max(0, tokens) * (time.monotonic() - self._first_output_monotonic) / max(1, made - 1)

    def stage_durations(self, envelope: Envelope) -> dict[str, float]:
        """Milliseconds per stage; machines agree but for a little, so never below zero."""
        now = self.now() * 1000
        first = self.first_output_at_ms or now
        spans = {
            "queue": envelope.dispatched - envelope.accepted,
            "dispatch": self.pulled_at_ms - envelope.dispatched,
            "prefill": first - self.pulled_at_ms,
            "decode": now - first,
            "total": now - envelope.accepted,
        }
        return {stage: max(0.0, ms) for stage, ms in spans.items()}


class DeadlineTimer:
    """Call something after a time, at once when the time is past, never after it was left."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds, self._call = seconds, call
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._seconds <= 0:
            self._call()
        else:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._call)

    def __exit__(self, *_: object) -> None:
        if self._handle:
            self._handle.cancel()
