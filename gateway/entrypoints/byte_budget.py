"""Byte budget: bounds the bytes of the frames that one WebSocket is submitting."""

import asyncio


class ByteBudget:
    """Counts the bytes of a WebSocket's frames in submission; a reader waits while they are many.

    `wait_for_room` waits while the sum is `limit` or more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, size: int) -> None:
        """Add `size` bytes to the sum; this never waits, so the sum may exceed the limit."""
        self._bytes += size
        if self._bytes >= self._limit:
            self._has_room.clear()

    def remove(self, size: int) -> None:
        """Subtract `size` bytes that were added before, because their frame has been submitted."""
        self._bytes -= size
        if self._bytes < self._limit:
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Wait until the sum is below `limit`; return at once if it is. Adds nothing."""
        await self._has_room.wait()
