"""The arithmetic of quotas: minutes that slide, leases that overlap, days of UTC. Pure.

Times are epoch seconds by the shared clock: gateways that differ by less than half a lease agree.
"""

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime

MINUTE_SECONDS = 60
DAY_SECONDS = 86400
SLOT_SECONDS = 6.0  # what a dead gateway has reserved is forgotten within one and a half


def minute_number(now: float) -> int:
    """The number of the minute since the epoch."""
    return int(now // MINUTE_SECONDS)


def utc_day(now: float) -> str:
    """The day of UTC, as `2026-11-21`."""
    return datetime.fromtimestamp(now, UTC).date().isoformat()


def seconds_until_tomorrow(now: float) -> float:
    """Seconds until the next day of UTC."""
    return DAY_SECONDS - now % DAY_SECONDS


def open_slots(now: float) -> tuple[int, ...]:
    """The leases in which what is held now must be counted: this one, and in time the next.

    In the second half of a lease everybody counts in the next one too, so that it is complete when
    it begins. Who does not, because he is dead or frozen, has nothing there.
    """
    passed, rest = divmod(now, SLOT_SECONDS)
    current = int(passed)
    return (current, current + 1) if rest >= SLOT_SECONDS / 2 else (current,)


def seconds_until_next_half_slot(now: float) -> float:
    """Seconds until `leases` changes."""
    half = SLOT_SECONDS / 2
    return half - now % half


@dataclass(frozen=True)
class QuotaWindow:
    """What was used in the minute before `at` and in the one that holds `at`.

    The use of the last 60 seconds is estimated as if the earlier minute's were spread evenly over
    it ("sliding window counter"). A quota therefore refills steadily, as a bucket does; in no
    minute of the clock is more used than it says.
    """

    previous: int
    current: int
    at: float

    @property
    def _minute_start(self) -> float:
        return self.at - self.at % MINUTE_SECONDS

    def used_at(self, now: float) -> float:
        """The use of the last minute, if nothing has been added since `at`."""
        passed = (now - self._minute_start) / MINUTE_SECONDS
        if passed < 1:
            return self.current + self.previous * (1 - passed)
        return self.current * max(0.0, 2 - passed)

    def without(self, amount: int) -> "QuotaWindow":
        """The same without `amount` in the later minute."""
        return replace(self, current=self.current - amount)

    def remaining(self, limit: int, now: float) -> int:
        return max(0, math.floor(limit - self.used_at(now)))

    def seconds_until_fits(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` fits if nothing else comes; `amount` is at most `limit`."""
        room = limit - amount
        if self.used_at(now) <= room:
            return 0.0
        if self.current <= room:
            minutes = 1 - (room - self.current) / self.previous
        else:
            minutes = 2 - room / self.current
        return max(0.0, self._minute_start + minutes * MINUTE_SECONDS - now)

    def seconds_until_empty(self, now: float) -> float:
        """Seconds until nothing is in use any more."""
        minutes = 2 if self.current > 0 else 1 if self.previous > 0 else 0
        return max(0.0, self._minute_start + minutes * MINUTE_SECONDS - now) if minutes else 0.0
