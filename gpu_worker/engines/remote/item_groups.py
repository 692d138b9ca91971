"""Collects items for a single-item API into groups, whose calls begin together. Pure.

A server that is paid by the second, or asleep between calls, is then busy for a while and idle for
a while. A group is due when it has enough items, or when the first of them to run out of time has
waited for its window

    W = min(max_seconds, (goal - p95) / 2)

where `goal` is what is left of the item's latency goal as it comes, and `p95` is the 95th
percentile of how long the latest items took from the begin of their group. The other half of what
is left is for times that are longer than those. An item with a goal does not wait before anything
is measured; one without a goal waits for `max_seconds`.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_LATEST = 128  # service times that count
_PERCENTILE = 0.95
_NEVER = float("inf")


class ServiceTimes:
    """The seconds that the latest items took from the begin of their group to their answer."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LATEST)

    def add(self, seconds: float) -> None:
        """Count an item that was answered after so long."""
        self._seconds.append(seconds)

    @property
    def p95(self) -> float:
        """The 95th percentile in seconds; infinite before the first."""
        if not self._seconds:
            return _NEVER
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, int(_PERCENTILE * len(ordered)))]


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    item: T
    count: int
    added_at: float
    goal: float
    due: float


class ItemGroups(Generic[T]):
    """Collects items and says when they are due as one group; all times are of any one clock.

    A group is full at `size` items. No item waits for more than `max_seconds`.
    """

    def __init__(self, size: int, max_seconds: float) -> None:
        assert size > 0, f"a group of {size} holds nothing"
        self._size, self._max_seconds = size, max_seconds
        self._waiting: list[_Waiting[T]] = []
        self.times = ServiceTimes()

    def window_seconds(self, goal_seconds: float | None) -> float:
        """Return how long an item may wait that has so many seconds left of its latency goal."""
        if goal_seconds is None:
            return self._max_seconds
        return min(self._max_seconds, max(0.0, (goal_seconds - self.times.p95) / 2))

    def add(self, item: T, count: int, now: float, goal: float | None) -> None:
        """Add what stands for `count` items, whose answer is wanted by `goal` (None: no time)."""
        due = now + self.window_seconds(None if goal is None else goal - now)
        self._waiting.append(_Waiting(item, count, now, _NEVER if goal is None else goal, due))

    def remove(self, item: T) -> None:
        """Drop an item that waits no more. Idempotent."""
        self._waiting = [each for each in self._waiting if each.item != item]

    def due_at(self) -> float | None:
        """Return when the group is due: at once (minus infinity) if it is full; None if empty."""
        if not self._waiting:
            return None
        if sum(each.count for each in self._waiting) >= self._size:
            return -_NEVER
        return min(each.due for each in self._waiting)

    def pop_due(self, now: float) -> list[T]:
        """Remove and return the group if it is due, the earliest goal first; else nothing."""
        due = self.due_at()
        if due is None or due > now:
            return []
        group, self._waiting = self._waiting, []
        return [each.item for each in sorted(group, key=lambda each: (each.goal, each.added_at))]
