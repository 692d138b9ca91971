"""Connections without a request: who is there has not said so, or asks for nothing just now.

They cost no credential, so their number is bounded. The one that has waited longest gives way to
a new one: an honest client's request comes within moments, so under any flood it is the flood's own
that goes. Pure.
"""

from typing import Protocol


class IdleConnection(Protocol):
    """A connection that waits for a request."""

    def evict(self) -> None:
        """End it: another one needs its place."""


class IdleConnections:
    """At most `places` connections that wait, the longest waiting first."""

    def __init__(self, places: int) -> None:
        self._max_idle = places
        self._idle: dict[IdleConnection, None] = {}

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, one: IdleConnection) -> None:
        """It waits from now on; if there are too many the longest waiting one gives way."""
        self._idle[one] = None
        if len(self._idle) > self._max_idle:
            self.evict_longest_idle()

    def discard(self, one: IdleConnection) -> None:
        """Its request has come, or it has gone. Idempotent."""
        self._idle.pop(one, None)

    def evict_longest_idle(self) -> bool:
        """Let the longest waiting one give way; False if nobody waits."""
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        self.discard(longest)
        longest.evict()
        return True
