"""The bytes of what is under way, to be waited for while they are too many."""

import asyncio


class ByteBudget:
    """`room` waits while as much as `limit` is on it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= self._limit:
            self._has_room.clear()

    def remove(self, size: int) -> None:
        """So much that was added is done with."""
        self._bytes -= size
        if self._bytes < self._limit:
            self._has_room.set()

    async def wait_for_room(self) -> None:
        await self._has_room.wait()
