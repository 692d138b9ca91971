"""From the loop's thread to the engine's: a bounded queue, the one place where both meet."""

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_ITEMS = 4096


class CrossThreadQueue(Generic[T]):
    """`put` is for the loop that made it, `take` for one other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._filled = threading.Event()
        self._emptied = asyncio.Event()
        self._is_full = False  # a writer waits, or is about to

    async def put(self, item: T) -> None:
        """Returns once there is room for the item: a reader that stands still stops the writers."""
        while len(self._items) >= MAX_ITEMS:
            self._emptied.clear()
            self._is_full = True
            await self._emptied.wait()
        self._items.append(item)
        self._filled.set()

    def get_all(self, seconds: float) -> list[T]:
        """Everything that is there, waiting so long for something to come."""
        self._filled.wait(seconds)
        self._filled.clear()
        items = [self._items.popleft() for _ in range(len(self._items))]
        if self._is_full:
            self._is_full = False
            self._loop.call_soon_threadsafe(self._emptied.set)
        return items
