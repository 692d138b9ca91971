"""Decides which requests may start in an engine: side by side, but suspects alone. Pure.

A request that makes engines fail mostly does so as it starts. If the engine fails while only one
request is starting, that request is known to be at fault.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class QueuedStart:
    """One request's place in a `StartQuarantine`; `on_admitted` is called once, when it may start.

    An exclusive one starts alone: no other is starting at the same time.
    """

    is_exclusive: bool
    on_admitted: Callable[[], None]


class StartQuarantine:
    """Decides which requests may start in one engine now, first come, first served.

    A start lasts from its admission until its `release`. Starts run side by side, but an exclusive
    one is admitted only when no other is under way, and those behind it wait until it is released.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedStart] = deque()
        self._starting: set[QueuedStart] = set()

    def enqueue(self, exclusive: bool, on_admitted: Callable[[], None]) -> QueuedStart:
        """Queue a request and return its place in the queue, which `release` needs.

        `on_admitted` is called when the request may start, perhaps before this returns. The caller
        must call `release` once the request has started, or if it no longer wants to start.
        """
        start = QueuedStart(exclusive, on_admitted)
        self._waiting.append(start)
        self._admit()
        return start

    def release(self, start: QueuedStart) -> None:
        """End a start that was admitted, or remove one that waits, and admit those that may follow.

        Calls their `on_admitted` before it returns. Idempotent.
        """
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
