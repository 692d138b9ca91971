"""The policy of a model: the workers that it may have by the table `[fleet]`. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from streams import messages

DAY_SECONDS = 86400


@dataclass(frozen=True)
class WarmPool:
    """Workers that there are at the least in a part of each day, in seconds after midnight UTC.

    One that ends before it begins, or when it begins, lasts over midnight. `weekdays` are the days
    on which it begins, Monday is 0.
    """

    begins: int
    ends: int
    workers: int
    weekdays: Sequence[int] = tuple(range(7))

    def is_open_at(self, now: float) -> bool:
        """Return True if the pool is wanted at a time."""
        second = now % DAY_SECONDS
        begun_today = second >= self.begins
        if self.begins < self.ends and not (begun_today and second < self.ends):
            return False
        if self.begins >= self.ends and not (begun_today or second < self.ends):
            return False
        day = datetime.fromtimestamp(now if begun_today else now - DAY_SECONDS, UTC)
        return day.weekday() in self.weekdays


@dataclass(frozen=True)
class ModelPolicy:
    """Bounds on the workers of a model; with `min_workers` 0 it may rest without any.

    It does once nothing has been asked of it for `idle_seconds`, outside of its warm pools. All
    demand of the `off_spot` priorities has machines that are not spot machines.
    """

    min_workers: int = 0
    max_workers: int = 4
    idle_seconds: float = 300.0
    warm_pools: Sequence[WarmPool] = ()
    off_spot: Sequence[str] = ()

    def least_workers(self, now: float) -> int:
        """Return how many workers there are at the least at a time."""
        open_pools = (pool.workers for pool in self.warm_pools if pool.is_open_at(now))
        return min(max([self.min_workers, *open_pools]), self.max_workers)

    @classmethod
    def from_map(cls, wire: Mapping[str, Any]) -> Self:
        """Return the policy of a map with its fields; raises TypeError if one is missing."""
        pools = tuple(
            messages.from_wire(WarmPool, {**each, "weekdays": tuple(each["weekdays"])})
            for each in wire.get("warm_pools", ())
        )
        off_spot = tuple(wire.get("off_spot", ()))
        return messages.from_wire(cls, {**wire, "warm_pools": pools, "off_spot": off_spot})
