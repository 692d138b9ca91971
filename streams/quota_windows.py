"""Arithmetic of quotas: sliding minutes, overlapping slots of six seconds, UTC periods. Pure.

Times are epoch seconds by the cluster clock. Gateways whose clocks differ by less than half a slot
agree.
"""

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

MINUTE_SECONDS = 60
DAY_SECONDS = 86400
_MORE_THAN_A_MONTH = 32  # days after the first of any month, it is the next month
SLOT_SECONDS = 6.0  # open requests of a dead gateway stop counting within one and a half slots


def minute_number(now: float) -> int:
    """Return the number of the current minute, counted from the epoch; `now` is epoch seconds."""
    return int(now // MINUTE_SECONDS)


def utc_day(now: float) -> str:
    """Return the current day of UTC, as `2026-11-21`; `now` is epoch seconds."""
    return datetime.fromtimestamp(now, UTC).date().isoformat()


class QuotaPeriod(StrEnum):
    """A day or a calendar month of UTC, in which a quota of tokens or spend holds."""

    DAY = "day"
    MONTH = "month"

    def name_at(self, now: float) -> str:
        """Return the period that holds `now` (epoch seconds): `2026-11-21`, or `2026-11`."""
        day = utc_day(now)
        return day if self is QuotaPeriod.DAY else day[:7]

    def end_after(self, now: float) -> datetime:
        """Return when the period that holds `now` (epoch seconds) ends and the next one begins."""
        at = datetime.fromtimestamp(now, UTC)
        start = at.replace(hour=0, minute=0, second=0, microsecond=0)
        if self is QuotaPeriod.DAY:
            return start + timedelta(days=1)
        return (start.replace(day=1) + timedelta(days=_MORE_THAN_A_MONTH)).replace(day=1)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next period begins; `now` is epoch seconds."""
        return self.end_after(now).timestamp() - now


def open_slots(now: float) -> tuple[int, ...]:
    """Return the numbers of the slots on whose counters a request that is open now must be counted.

    A slot is six seconds; slots are numbered from the epoch, and `now` is epoch seconds. The result
    is the current slot and, in its second half, also the next one: every gateway counts its open
    requests there ahead of time, so that the next slot is complete when it begins. A gateway that
    is dead or frozen does not, and its requests are gone from the next slot.
    """
    number, rest = divmod(now, SLOT_SECONDS)
    current = int(number)
    return (current, current + 1) if rest >= SLOT_SECONDS / 2 else (current,)


def seconds_until_next_half_slot(now: float) -> float:
    """Return the seconds until the result of `open_slots` changes; `now` is epoch seconds."""
    half = SLOT_SECONDS / 2
    return half - now % half


@dataclass(frozen=True)
class QuotaWindow:
    """Use of one per-minute quota, read at `at` (epoch seconds), as a sliding window counter.

    `current` is the amount used in the clock minute that holds `at`, and `previous` that in the
    minute before. The use of the last 60 seconds is estimated as if `previous` were spread evenly
    over its minute. A quota therefore refills steadily, as a token bucket does; in no minute of the
    clock is more used than the quota.
    """

    previous: int
    current: int
    at: float

    @property
    def _minute_start(self) -> float:
        return self.at - self.at % MINUTE_SECONDS

    def used_at(self, now: float) -> float:
        """Return the estimated use in the 60 seconds before `now` (epoch seconds).

        Assumes that nothing has been added since `at`.
        """
        passed = (now - self._minute_start) / MINUTE_SECONDS
        if passed < 1:
            return self.current + self.previous * (1 - passed)
        return self.current * max(0.0, 2 - passed)

    def without(self, amount: int) -> "QuotaWindow":
        """Return a copy in which `amount` less is used in the current minute."""
        return replace(self, current=self.current - amount)

    def remaining(self, limit: int, now: float) -> int:
        """Return how much of a quota of size `limit` is unused at `now` (epoch seconds).

        The amount is rounded down and never below 0.
        """
        return max(0, math.floor(limit - self.used_at(now)))

    def seconds_until_fits(self, amount: int, limit: int, now: float) -> float:
        """Return the seconds from `now` until a quota of size `limit` has room for `amount`.

        0 means that there is room now. Assumes that nothing else is added. `amount` must be at most
        `limit`; `now` is epoch seconds.
        """
        room = limit - amount
        if self.used_at(now) <= room:
            return 0.0
        if self.current <= room:
            minutes = 1 - (room - self.current) / self.previous
        else:
            minutes = 2 - room / self.current
        return max(0.0, self._minute_start + minutes * MINUTE_SECONDS - now)

    def seconds_until_empty(self, now: float) -> float:
        """Return the seconds from `now` (epoch seconds) until the estimated use is 0.

        Assumes that nothing is added.
        """
        minutes = 2 if self.current > 0 else 1 if self.previous > 0 else 0
        return max(0.0, self._minute_start + minutes * MINUTE_SECONDS - now) if minutes else 0.0
