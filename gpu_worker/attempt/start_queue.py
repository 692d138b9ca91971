"""Who may start in an engine: requests side by side, one that is suspected alone. Pure.

A request that makes engines fail mostly does so as it starts. When its engine fails while nobody
else is starting, it is known who was to blame.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class QueuedStart:
    """One request's wish to start; `begin` is called when it may."""

    is_exclusive: bool
    on_admitted: Callable[[], None]


class StartQueue:
    """First come, first served; who starts alone waits for the others, and they for it."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedStart] = deque()
        self._starting: set[QueuedStart] = set()

    def enqueue(self, alone: bool, begin: Callable[[], None]) -> QueuedStart:
        """Call `begin` now or later; then `leave` must follow, when it has started."""
        start = QueuedStart(alone, begin)
        self._waiting.append(start)
        self._admit()
        return start

    def release(self, start: QueuedStart) -> None:
        """It has started, or does not want to any more. Idempotent."""
        if start in self._waiting:
            self._waiting.remove(start)
        self._starting.discard(start)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._can_start(self._waiting[0]):
            start = self._waiting.popleft()
            self._starting.add(start)
            start.on_admitted()

    def _can_start(self, start: QueuedStart) -> bool:
        return not any(start.is_exclusive or other.is_exclusive for other in self._starting)
