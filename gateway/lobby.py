"""Connections without a request: who is there has not said so, or asks for nothing just now.

They cost no credential, so their number is bounded. The one that has waited longest gives way to
a new one: an honest client's request comes within moments, so under any flood it is the flood's own
that goes. Pure.
"""

from typing import Protocol


class Waiting(Protocol):
    """A connection that waits for a request."""

    def give_way(self) -> None:
        """End it: another one needs its place."""


class Lobby:
    """At most `places` connections that wait, the longest waiting first."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: dict[Waiting, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, one: Waiting) -> None:
        """It waits from now on; if there are too many the longest waiting one gives way."""
        self._waiting[one] = None
        if len(self._waiting) > self._places:
            self.make_room()

    def leave(self, one: Waiting) -> None:
        """Its request has come, or it has gone. Idempotent."""
        self._waiting.pop(one, None)

    def make_room(self) -> bool:
        """Let the longest waiting one give way; False if nobody waits."""
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self.leave(longest)
        longest.give_way()
        return True
