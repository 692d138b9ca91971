"""Byte budget: bounds the bytes of the frames that one WebSocket is submitting."""

import asyncio


class ByteBudget:
    """Counts bytes in flight; `wait_for_room` waits while `limit` bytes or more are in flight."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, size: int) -> None:
        """Count `size` more bytes as in flight; this never waits, so the limit may be exceeded."""
        self._bytes += size
        if self._bytes >= self._limit:
            self._has_room.clear()

    def remove(self, size: int) -> None:
        """Take off `size` bytes that were added, because their frame has been submitted."""
        self._bytes -= size
        if self._bytes < self._limit:
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Wait until fewer than `limit` bytes are in flight."""
        await self._has_room.wait()
