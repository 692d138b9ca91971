"""A bounded queue from the event loop's thread to the engine's, the only thing both use."""

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_ITEMS = 4096


class CrossThreadQueue(Generic[T]):
    """A queue of about `MAX_ITEMS` items at most, from an event loop to one other thread.

    Make it on the event loop, and call `put` there; the other thread calls `get_all`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._filled = threading.Event()
        self._emptied = asyncio.Event()
        self._is_writer_waiting = False  # set before it waits

    async def put(self, item: T) -> None:
        """Append an item; waits while the queue is full, so that a slow reader slows the writers.

        Cancelling the wait drops the item.
        """
        while len(self._items) >= MAX_ITEMS:
            self._emptied.clear()
            self._is_writer_waiting = True
            await self._emptied.wait()
        self._items.append(item)
        self._filled.set()

    def get_all(self, seconds: float) -> list[T]:
        """Remove and return all items, in order; blocks up to `seconds` for the first one.

        The list may be empty after that.
        """
        self._filled.wait(seconds)
        self._filled.clear()
        items = [self._items.popleft() for _ in range(len(self._items))]
        if self._is_writer_waiting:
            self._is_writer_waiting = False
            self._loop.call_soon_threadsafe(self._emptied.set)
        return items
