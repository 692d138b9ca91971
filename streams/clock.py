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
class Look:
    """A broker was asked for the time, and `told` it (epoch seconds), between two ticks."""

    asked: float
    answered: float
    told: float

    @property
    def ahead(self) -> float:
        """The seconds from ticks to epoch time, as it seems."""
        return self.told - (self.asked + self.answered) / 2

    def error(self, at: float) -> float:
        """How far off `ahead` can be at a later tick."""
        return (self.answered - self.asked) / 2 + DRIFT * (at - self.asked)

    def differs(self, earlier: "Look") -> float:
        """By how many seconds the broker's clock was moved in between, at least."""
        apart = abs(self.ahead - earlier.ahead)
        return max(0.0, apart - self.error(self.answered) - earlier.error(self.answered))


class SharedClock:
    """One process's view of the shared time; `hear` what a look has brought.

    Until the first look it is what this machine's wall clock said at the start.
    """

    def __init__(self, ticks: Callable[[], float] = ticks) -> None:
        self.ticks = ticks
        self._ahead = time.time() - ticks()
        self._look: Look | None = None  # the surest
        self._odd: Look | None = None  # the first of those that tell of quite another time

    def now(self) -> float:
        """Epoch seconds."""
        return self.ticks() + self._ahead

    def now_ms(self) -> int:
        """Epoch milliseconds, as headers and records have them."""
        return int(self.now() * 1000)

    def until(self, at_ms: float) -> float:
        """Seconds from now to a time in epoch milliseconds."""
        return at_ms / 1000 - self.now()

    @property
    def is_doubted(self) -> bool:
        """Whether the last look told of quite another time."""
        return self._odd is not None

    def hear(self, look: Look) -> float:
        """Take in a look; by how many seconds the clock was moved."""
        known = self._look
        moved = look.differs(known) if known else 0.0
        if moved > STEP_SECONDS and not self._lasts(look):
            return 0.0
        self._odd = None
        if known and not moved and known.error(look.answered) < look.error(look.answered):
            return 0.0
        before, self._look, self._ahead = self._ahead, look, look.ahead
        return self._ahead - before

    def _lasts(self, look: Look) -> bool:
        """Whether looks have told of this other time for so long that it counts."""
        if self._odd is None or look.differs(self._odd) > STEP_SECONDS:
            self._odd = look
        return look.answered - self._odd.answered >= STEPOUT_SECONDS
