"""The time that all services share: epoch seconds estimated from samples of the broker's clock.

The wall clocks of the services' machines are not used. Durations are measured by a clock that
nobody sets (`ticks`); the time of day comes from samples. The broker read its clock at some moment
between question and answer, so the middle of the two is off by half the round trip at most (F.
Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989). Of samples that can
be of the same clock, the one with the smaller possible error is kept; its error grows with each
second since its question by what clocks drift (the clock filter of RFC 5905, section 10). Clocks of
brokers may differ, and may be set: a small step is followed at once, a larger one when it lasts
(the step and stepout thresholds of section 11.3).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

STEP_SECONDS = 2.0  # followed at once, if smaller: a leap second, the clock of a new leader
STEPOUT_SECONDS = 15.0  # a larger step must last so long: it may be set right, or the leader change
DRIFT = 1e-4  # seconds per second; RFC 5905 allows for 15e-6, cheap quartz needs more

_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while a machine sleeps


def ticks() -> float:
    """Return seconds since some fixed moment, by a clock that nobody sets.

    The clock goes on while the machine sleeps, where the system has such a clock.
    """
    return time.clock_gettime(_CLOCK_ID)


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One question for the broker's time, with its answer.

    `sent_at` and `received_at` are `ticks()` of this process; `server_time` is the answer in epoch
    seconds.
    """

    sent_at: float
    received_at: float
    server_time: float

    @property
    def offset(self) -> float:
        """Estimated seconds to add to `ticks()` to get epoch time."""
        return self.server_time - (self.sent_at + self.received_at) / 2

    def max_error(self, at: float) -> float:
        """Return by how many seconds `offset` can be wrong at `at`, a later time in ticks.

        That is half the round trip, plus the drift of clocks since the question.
        """
        return (self.received_at - self.sent_at) / 2 + DRIFT * (at - self.sent_at)

    def stepped_by(self, earlier: "ClockSample") -> float:
        """Return by how many seconds, at least, the broker's clock was set since `earlier`.

        The result is never negative; it is 0 where the errors of both samples can explain the
        difference.
        """
        difference = abs(self.offset - earlier.offset)
        error = self.max_error(self.received_at) + earlier.max_error(self.received_at)
        return max(0.0, difference - error)


class ClusterClock:
    """The cluster clock of one process: epoch time, corrected by samples of the broker's clock.

    Until the first `add_sample` the clock runs from this machine's wall clock as read at the start.
    Calls to `now` never wait.
    """

    def __init__(self, ticks: Callable[[], float] = ticks) -> None:
        self.ticks = ticks
        self._offset = time.time() - ticks()
        self._best_sample: ClockSample | None = None  # the one with the smallest possible error
        self._outlier: ClockSample | None = None  # the first sample of a suspected step

    def now(self) -> float:
        """Return the cluster's time in epoch seconds."""
        return self.ticks() + self._offset

    def now_ms(self) -> int:
        """Return the cluster's time in whole epoch milliseconds, as headers and records have it."""
        return int(self.now() * 1000)

    def seconds_until(self, at_ms: float) -> float:
        """Return the seconds from now until `at_ms` (epoch milliseconds); negative once past."""
        return at_ms / 1000 - self.now()

    @property
    def is_step_suspected(self) -> bool:
        """True while the broker's clock seems to have jumped, but not for `STEPOUT_SECONDS` yet.

        The clock follows such a jump only when it has lasted so long.
        """
        return self._outlier is not None

    def add_sample(self, sample: ClockSample) -> float:
        """Correct the clock by a sample; return by how many seconds the clock was moved.

        0 means that the sample was not used: a better one is known, or it differs so much that the
        broker's clock may have jumped (`is_step_suspected`).
        """
        best = self._best_sample
        step = sample.stepped_by(best) if best else 0.0
        if step > STEP_SECONDS and not self._has_lasted(sample):
            return 0.0
        self._outlier = None
        if (
            best
            and not step
            and best.max_error(sample.received_at) < sample.max_error(sample.received_at)
        ):
            return 0.0
        before, self._best_sample, self._offset = self._offset, sample, sample.offset
        return self._offset - before

    def _has_lasted(self, sample: ClockSample) -> bool:
        """Return whether samples have agreed on this step for `STEPOUT_SECONDS`."""
        if self._outlier is None or sample.stepped_by(self._outlier) > STEP_SECONDS:
            self._outlier = sample
        return sample.received_at - self._outlier.received_at >= STEPOUT_SECONDS
