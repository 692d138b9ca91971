"""Idle connections: those where nothing happens, of which the longest idle one is evicted.

They wait for a request, or for their client to read.

Opening them takes no credential, so their number is bounded. The connection that has been idle
longest gives way to a new one: an honest client's request comes within moments, so under a flood it
is the flood's own connections that are closed. Pure.
"""

from typing import Protocol


class IdleConnection(Protocol):
    """A connection on which nothing happens."""

    def evict(self) -> None:
        """Close the connection, because there are too many; called by `IdleConnections`."""


class IdleConnections:
    """The idle connections of one gateway, at most `max_idle`, in the order of becoming idle."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._idle: dict[IdleConnection, None] = {}

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, connection: IdleConnection) -> None:
        """Add a connection that has become idle.

        If there are more than `max_idle` then, the one that has been idle longest is evicted.
        """
        self._idle[connection] = None
        if len(self._idle) > self._max_idle:
            self.evict_longest_idle()

    def discard(self, connection: IdleConnection) -> None:
        """Remove a connection that is no longer idle, or is closed; it is not evicted."""
        self._idle.pop(connection, None)

    def evict_longest_idle(self) -> bool:
        """Evict the connection that has been idle longest; return False if there is none."""
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        self.discard(longest)
        longest.evict()
        return True
