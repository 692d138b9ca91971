"""What waits to be written to one socket: bounded by bytes, written by one task.

Behind it are 16 KiB of `gateway/gathered.py`, 64 of the transport and 32 of the kernel
(`gateway/server.py`), so that all that a client can make us keep by not reading is under 256 KiB.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from sys import getsizeof

LIMIT_BYTES = 128 * 1024
OVERHEAD_BYTES = 8  # of a frame: its place here

Frame = str | bytes
Write = Callable[[Frame], Awaitable[None]]


class Outbound:
    """Frames for one socket. `drained` is called when it has room again after being full."""

    def __init__(self, drained: Callable[[], None]) -> None:
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._ended = False
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._full = False
        self._drained = drained

    def put(self, frame: Frame) -> bool:
        """Add a frame; False when what feeds this should pause until it has drained."""
        self._frames.append(frame)
        self._bytes += getsizeof(frame) + OVERHEAD_BYTES
        self._ready.set()
        if self._bytes > LIMIT_BYTES and not self._full:
            self._full = True
            self._room.clear()
        return not self._full

    def end(self) -> None:
        """Nothing more will be put: `run` returns when everything is written. Idempotent."""
        self._ended = True
        self._ready.set()

    async def room(self) -> None:
        """Wait until this is not full."""
        await self._room.wait()

    async def run(self, write: Write) -> None:
        """Write until cancelled or ended."""
        while self._frames or not self._ended:
            await self._ready.wait()
            self._ready.clear()
            while self._frames:
                frame = self._frames.popleft()
                self._bytes -= getsizeof(frame) + OVERHEAD_BYTES
                await write(frame)
                if self._full and self._bytes < LIMIT_BYTES // 2:
                    self._empty()

    def _empty(self) -> None:
        self._full = False
        self._room.set()
        self._drained()
