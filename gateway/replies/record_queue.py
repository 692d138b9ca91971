"""A sink to iterate over: the records of one request, with a bound on what waits for its reader."""

import asyncio
from collections import deque
from collections.abc import Callable

from streams.messages import Record

LIMIT_BYTES = 128 * 1024  # as `gateway/replies/send_buffer.py`
OVERHEAD_BYTES = 800  # of a record, unpacked


class ClientGone(Exception):
    """The client has left."""


class RecordQueue:
    """Records in order. `drained` is called when a full reader has room again."""

    def __init__(self, drained: Callable[[], None]) -> None:
        self._records: deque[tuple[Record, int]] = deque()
        self._bytes = 0
        self._is_full = False
        self._closed: Exception | None = None
        self._ready = asyncio.Event()
        self._drained = drained

    def put(self, record: Record, size: int) -> bool:
        """The sink."""
        if self._closed:
            return True
        self._bytes += size + OVERHEAD_BYTES
        self._is_full = self._is_full or self._bytes > LIMIT_BYTES
        self._records.append((record, size))
        self._ready.set()
        return not self._is_full

    def close(self, why: Exception) -> None:
        """`next` raises this behind what is here already; `ClientGone` at once."""
        self._closed = why
        if isinstance(why, ClientGone):
            self._records.clear()
        self._ready.set()

    async def next(self) -> Record:
        """The next record; waits for it."""
        while not self._records and not self._closed:
            self._ready.clear()
            await self._ready.wait()
        if self._records:
            return self._pop()
        assert self._closed
        raise self._closed

    def next_nowait(self) -> Record | None:
        """The next record if it is here already."""
        return self._pop() if self._records else None

    def _pop(self) -> Record:
        record, size = self._records.popleft()
        self._bytes -= size + OVERHEAD_BYTES
        if self._is_full and self._bytes < LIMIT_BYTES // 2:
            self._is_full = False
            self._drained()
        return record
