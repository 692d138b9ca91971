"""The time that all services share: epoch seconds, by the clock of the brokers.

Nobody's wall clock is asked. How long something takes is measured by a clock that nobody sets;
what time it is, by looks at the brokers' clock. An answer tells it, so it was told at some moment
between question and answer, and the middle is off by half the round trip at most (F. Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989). Of looks that can be of one
clock the surer is kept; from its question on, each second adds what clocks drift (the clock filter
of RFC 5905, section 10). Brokers' clocks may differ, and be set: a little is followed at once, more
when it lasts (the step and stepout thresholds of its section 11.3).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

STEP_SECONDS = 2.0  # what is followed at once: a leap second, the clock of a new leader
STEPOUT_SECONDS = 15.0  # a broker that is soon set right, or loses its lead, is waited for
DRIFT = 1e-4  # seconds per second; RFC 5905 allows for 15e-6, cheap quartz needs more

_TICKING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while a machine sleeps


def ticks() -> float:
    """Seconds by a clock that nobody sets, since some moment."""
    return time.clock_gettime(_TICKING)


@dataclass(frozen=True, slots=True)
class ClockSample:
    """A broker was asked for the time, and `told` it (epoch seconds), between two ticks."""

    sent_at: float
    received_at: float
    server_time: float

    @property
    def offset(self) -> float:
        """The seconds from ticks to epoch time, as it seems."""
        return self.server_time - (self.sent_at + self.received_at) / 2

    def max_error(self, at: float) -> float:
        """How far off `ahead` can be at a later tick."""
        return (self.received_at - self.sent_at) / 2 + DRIFT * (at - self.sent_at)

    def stepped_by(self, earlier: "ClockSample") -> float:
        """By how many seconds the broker's clock was moved in between, at least."""
        apart = abs(self.offset - earlier.offset)
        return max(
            0.0, apart - self.max_error(self.received_at) - earlier.max_error(self.received_at)
        )


class ClusterClock:
    """One process's view of the shared time; `hear` what a look has brought.

    Until the first look it is what this machine's wall clock said at the start.
    """

    def __init__(self, ticks: Callable[[], float] = ticks) -> None:
        self.ticks = ticks
        self._offset = time.time() - ticks()
        self._best_sample: ClockSample | None = None  # the surest
        # The first of those that tell of quite another time
        self._outlier: ClockSample | None = None

    def now(self) -> float:
        """Epoch seconds."""
        return self.ticks() + self._offset

    def now_ms(self) -> int:
        """Epoch milliseconds, as headers and records have them."""
        return int(self.now() * 1000)

    def seconds_until(self, at_ms: float) -> float:
        """Seconds from now to a time in epoch milliseconds."""
        return at_ms / 1000 - self.now()

    @property
    def is_step_suspected(self) -> bool:
        """Whether the last look told of quite another time."""
        return self._outlier is not None

    def add_sample(self, look: ClockSample) -> float:
        """Take in a look; by how many seconds the clock was moved."""
        known = self._best_sample
        moved = look.stepped_by(known) if known else 0.0
        if moved > STEP_SECONDS and not self._has_lasted(look):
            return 0.0
        self._outlier = None
        if (
            known
            and not moved
            and known.max_error(look.received_at) < look.max_error(look.received_at)
        ):
            return 0.0
        before, self._best_sample, self._offset = self._offset, look, look.offset
        return self._offset - before

    def _has_lasted(self, look: ClockSample) -> bool:
        """Whether looks have told of this other time for so long that it counts."""
        if self._outlier is None or look.stepped_by(self._outlier) > STEP_SECONDS:
            self._outlier = look
        return look.received_at - self._outlier.received_at >= STEPOUT_SECONDS
