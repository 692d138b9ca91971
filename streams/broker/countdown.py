"""Time-outs that count only time in which the event loop ran.

A process may stand still for seconds: stopped, starved by its neighbours, or blocked by a call.
Answers then lie in the socket unread, and a time-out by the clock would take the broker for silent.
Here time passes in ticks. A tick counts as one however long it took, and time is up only after a
tick that came in time: by then the loop has read what had arrived.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

TICK_SECONDS = 0.1
_LATE_SECONDS = 0.1  # a busy loop's timers are some milliseconds late


class Ticker:
    """Calls `on_tick(in_time)` at the end of each tick until that returns None.

    It returns how many seconds the next tick is to take. `in_time` is False if the loop stood still
    when the tick should have ended.
    """

    def __init__(self, seconds: float, on_tick: Callable[[bool], float | None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_tick = on_tick
        self._schedule(seconds)

    def stop(self) -> None:
        """Never call `on_tick` again; idempotent."""
        self._timer.cancel()

    def _schedule(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._end_tick)

    def _end_tick(self) -> None:
        seconds = self._on_tick(self._loop.time() <= self._due + _LATE_SECONDS)
        if seconds is not None:
            self._schedule(seconds)


class Countdown:
    """Counts down from `seconds` while the event loop runs, and calls `on_end` once at the end.

    `seconds_left` is rounded up to a tick; it may be zero for another tick before the end, if the
    loop stood still in the last one.
    """

    def __init__(self, seconds: float, on_end: Callable[[], None] = lambda: None) -> None:
        self.seconds_left, self._on_end = seconds, on_end
        self._tick_seconds = min(seconds, TICK_SECONDS)
        self._ticker = Ticker(self._tick_seconds, self._count)

    def close(self) -> None:
        """Never call `on_end`; idempotent, also after the end."""
        self._ticker.stop()

    def _count(self, in_time: bool) -> float | None:
        self.seconds_left = max(0.0, self.seconds_left - self._tick_seconds)
        if self.seconds_left == 0.0 and in_time:
            self._on_end()
            return None
        self._tick_seconds = min(self.seconds_left, TICK_SECONDS) or TICK_SECONDS
        return self._tick_seconds


@asynccontextmanager
async def running_timeout(seconds: float) -> AsyncIterator[None]:
    """Cancel the `async with` block when the loop has run for `seconds`, and raise TimeoutError.

    This is `asyncio.timeout`, but time in which the process stood still does not count.
    """
    async with asyncio.timeout(None) as limit:
        with closing(Countdown(seconds, lambda: limit.reschedule(0))):
            yield
