"""The bytes of what is under way, to be waited for while they are too many."""

import asyncio


class Weight:
    """`room` waits while as much as `limit` is on it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._light = asyncio.Event()
        self._light.set()

    def add(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= self._limit:
            self._light.clear()

    def remove(self, size: int) -> None:
        """So much that was added is done with."""
        self._bytes -= size
        if self._bytes < self._limit:
            self._light.set()

    async def room(self) -> None:
        await self._light.wait()
