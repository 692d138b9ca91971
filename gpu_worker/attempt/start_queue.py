"""Decides which requests may start in an engine: side by side, but suspects alone. Pure.

A request that makes engines fail mostly does so as it starts. If the engine fails while only one
request is starting, that request is known to be at fault.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class QueuedStart:
    """One request in the queue; `on_admitted` is called when it may start.

    An exclusive one starts alone: no other is starting at the same time.
    """

    is_exclusive: bool
    on_admitted: Callable[[], None]


class StartQueue:
    """First come, first served: an exclusive start waits for those before it, and later ones wait.

    A start lasts from its admission to its `release`.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedStart] = deque()
        self._starting: set[QueuedStart] = set()

    def enqueue(self, exclusive: bool, on_admitted: Callable[[], None]) -> QueuedStart:
        """Queue a request; `on_admitted` is called when it may start, perhaps before this returns.

        `release` must follow once it has started, or no longer wants to.
        """
        start = QueuedStart(exclusive, on_admitted)
        self._waiting.append(start)
        self._admit()
        return start

    def release(self, start: QueuedStart) -> None:
        """End a start that is over, or leave the queue; admit those that may follow. Idempotent."""
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
