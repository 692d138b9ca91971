"""Queue of the records that wait for one HTTP response, bounded in bytes."""

import asyncio
from collections import deque
from collections.abc import Callable

from streams.messages import Record

LIMIT_BYTES = 128 * 1024  # as `gateway/replies/send_buffer.py`
OVERHEAD_BYTES = 800  # of a record as Python objects


class ClientGone(Exception):
    """The client has closed its connection before its response was complete."""


class RecordQueue:
    """The records that wait for one HTTP response, in order, bounded in bytes.

    A log subscription puts them, and the code that responds takes them. `on_drained` is called each
    time the queue is half empty again after it was full.
    """

    def __init__(self, on_drained: Callable[[], None]) -> None:
        self._records: deque[tuple[Record, int]] = deque()
        self._bytes = 0
        self._is_full = False
        self._closed: Exception | None = None
        self._ready = asyncio.Event()
        self._on_drained = on_drained

    def put(self, record: Record, size: int) -> bool:
        """Add a record of `size` bytes; return False if the queue is full now.

        The record is added in either case. After `close` it is dropped, and the result is True.
        """
        if self._closed:
            return True
        self._bytes += size + OVERHEAD_BYTES
        self._is_full = self._is_full or self._bytes > LIMIT_BYTES
        self._records.append((record, size))
        self._ready.set()
        return not self._is_full

    def close(self, reason: Exception) -> None:
        """Take no more records; make `next` raise `reason` after the records that are waiting.

        If `reason` is `ClientGone`, the waiting records are dropped and `next` raises at once.
        """
        self._closed = reason
        if isinstance(reason, ClientGone):
            self._records.clear()
        self._ready.set()

    async def next(self) -> Record:
        """Wait, without limit, for the next record and return it; cancelling loses no record.

        Raises the reason that was given to `close` when no record is left.
        """
        while not self._records and not self._closed:
            self._ready.clear()
            await self._ready.wait()
        if self._records:
            return self._pop()
        assert self._closed
        raise self._closed

    def next_nowait(self) -> Record | None:
        """Return the next record without waiting; None if there is none. Never raises."""
        return self._pop() if self._records else None

    def _pop(self) -> Record:
        record, size = self._records.popleft()
        self._bytes -= size + OVERHEAD_BYTES
        if self._is_full and self._bytes < LIMIT_BYTES // 2:
            self._is_full = False
            self._on_drained()
        return record
