"""What waits to be written to one socket: bounded by bytes, written by one task.

Behind it are 16 KiB of `gateway/server/write_coalescer.py`, 64 of the transport and 32 of the kernel
(`gateway/server/uvicorn_server.py`), so that all that a client can make us keep by not reading is under 256 KiB.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from sys import getsizeof

LIMIT_BYTES = 128 * 1024
OVERHEAD_BYTES = 8  # of a frame: its place here

EncodedFrame = str | bytes
Write = Callable[[EncodedFrame], Awaitable[None]]


class SendBuffer:
    """Frames for one socket. `drained` is called when it has room again after being full."""

    def __init__(self, drained: Callable[[], None]) -> None:
        self._frames: deque[EncodedFrame] = deque()
        self._bytes = 0
        self._is_finished = False
        self._has_frames = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_full = False
        self._drained = drained

    def put(self, frame: EncodedFrame) -> bool:
        """Add a frame; False when what feeds this should pause until it has drained."""
        self._frames.append(frame)
        self._bytes += getsizeof(frame) + OVERHEAD_BYTES
        self._has_frames.set()
        if self._bytes > LIMIT_BYTES and not self._is_full:
            self._is_full = True
            self._has_room.clear()
        return not self._is_full

    def finish(self) -> None:
        """Nothing more will be put: `run` returns when everything is written. Idempotent."""
        self._is_finished = True
        self._has_frames.set()

    async def wait_for_room(self) -> None:
        """Wait until this is not full."""
        await self._has_room.wait()

    async def run(self, write: Write) -> None:
        """Write until cancelled or ended."""
        while self._frames or not self._is_finished:
            await self._has_frames.wait()
            self._has_frames.clear()
            while self._frames:
                frame = self._frames.popleft()
                self._bytes -= getsizeof(frame) + OVERHEAD_BYTES
                await write(frame)
                if self._is_full and self._bytes < LIMIT_BYTES // 2:
                    self._mark_drained()

    def _mark_drained(self) -> None:
        self._is_full = False
        self._has_room.set()
        self._drained()
