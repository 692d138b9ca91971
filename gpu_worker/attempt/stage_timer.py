"""Times one attempt: when it reached its stages, its pace, and its deadline."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from streams.headers import Envelope

_MEASURED_TOKENS = 2  # the fewest that tell a pace: it is measured from the first output on


@dataclass
class StageTimer:
    """Times at which one attempt reached its stages, in epoch milliseconds.

    Make it when the work is pulled: that time becomes `pulled_at_ms`. `first_output_at_ms` is 0
    until the engine's first output. `now` returns epoch seconds.
    """

    now: Callable[[], float]  # epoch seconds
    pulled_at_ms: float = 0.0
    first_output_at_ms: float = 0.0
    _first_output_monotonic: float = 0.0  # the first output, by the monotonic clock

    def __post_init__(self) -> None:
        self.pulled_at_ms = self.now() * 1000

    def mark_first_output(self) -> None:
        """Record the present time as that of the engine's first output; call it once."""
        self.first_output_at_ms, self._first_output_monotonic = self.now() * 1000, time.monotonic()

    def estimate_seconds(self, tokens: int, generated: int) -> float | None:
        """Return the seconds that `tokens` more tokens will take at the mean pace so far.

        The pace is that of the `generated` tokens since the first output. Returns None while no
        pace is known: before the first output, and below two tokens. Zero tokens or fewer take 0
        seconds once there is an output.
        """
        if not self.first_output_at_ms or (tokens > 0 and generated < _MEASURED_TOKENS):
            return None
        elapsed = time.monotonic() - self._first_output_monotonic
        return max(0, tokens) * elapsed / max(1, generated - 1)

    def stage_durations(self, envelope: Envelope) -> dict[str, float]:
        """Return the milliseconds of each stage, by name, for an attempt that ends now.

        The stages are `queue`, `dispatch`, `prefill` (to the first output, or to now without one),
        `decode`, and `total` since the request was accepted. No value is below zero, although the
        clocks of two machines may differ a little.
        """
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
    """Context manager that calls `call` once if its block is still running after `seconds`.

    The call is made on the event loop, and on entering if `seconds` is zero or less; the block
    itself is not interrupted.
    """

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
