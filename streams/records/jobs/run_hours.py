"""Hours of the day in which a batch may run, by the clock of a time zone. Pure."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self
from zoneinfo import ZoneInfo

_TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])\Z")
_DAY_MINUTES = 24 * 60
_STEP_SECONDS = 60


def check_zone(zone: str) -> None:
    """Raise ValueError for what is no name of a time zone."""
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"{zone!r} is no time zone such as Europe/Berlin") from None


@dataclass(frozen=True)
class RunHours:
    """The minutes of the day from `start` to before `end`, over midnight if `end` is the earlier.

    `zone` is a name of the IANA time zone database.
    """

    start: int
    end: int
    zone: str

    @classmethod
    def parse(cls, start: str, end: str, zone: str) -> Self:
        """Return the hours between two times such as `22:00` and `06:00`.

        Raises ValueError for what is no time, for two equal ones, or for a zone that is not known.
        """
        minutes = []
        for told in (start, end):
            found = _TIME.match(told)
            if not found:
                raise ValueError(f"{told!r} is no time of day such as 22:00")
            minutes.append(int(found[1]) * 60 + int(found[2]))
        if minutes[0] == minutes[1]:
            raise ValueError("the two times are the same: leave the hours out to run at any time")
        check_zone(zone)
        return cls(minutes[0], minutes[1], zone)

    def is_open(self, now: float) -> bool:
        """Return True if the batch may run at an epoch second."""
        local = datetime.fromtimestamp(now, ZoneInfo(self.zone))
        minute = local.hour * 60 + local.minute
        return (minute - self.start) % _DAY_MINUTES < (self.end - self.start) % _DAY_MINUTES

    def next_opening(self, now: float) -> float:
        """Return the epoch second from which the batch may run: `now` if that is now."""
        if self.is_open(now):
            return now
        local = datetime.fromtimestamp(now, ZoneInfo(self.zone))
        hour, minute = divmod(self.start, 60)
        opening = local.replace(hour=hour, minute=minute, second=0, microsecond=0)
        if opening <= local:
            opening += timedelta(days=1)
        found = opening.timestamp()
        while not self.is_open(found):  # the clock skips that time on this day
            found += _STEP_SECONDS
        return found

    @property
    def times(self) -> tuple[str, str]:
        """The two times, such as `22:00` and `06:00`."""
        start, end = (f"{each // 60:02}:{each % 60:02}" for each in (self.start, self.end))
        return start, end

    def __str__(self) -> str:
        return f"{' to '.join(self.times)} in {self.zone}"
