"""Send buffer: encoded frames waiting to be written to one WebSocket, bounded in bytes.

Behind it are 16 KiB in `gateway/server/write_coalescer.py`, 64 in the transport and 32 in the
kernel (`gateway/server/uvicorn_server.py`), so a client that does not read makes us keep less than
256 KiB.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from sys import getsizeof

LIMIT_BYTES = 128 * 1024
OVERHEAD_BYTES = 8  # of a frame: its pointer in the deque

EncodedFrame = str | bytes
Write = Callable[[EncodedFrame], Awaitable[None]]


class SendBuffer:
    """The encoded frames that wait to be written to one WebSocket, in order, counted in bytes.

    All requests of the socket put frames, and one task writes them (`run`). `on_drained` is called
    each time the buffer is half empty again after it was full.
    """

    def __init__(self, on_drained: Callable[[], None]) -> None:
        self._frames: deque[EncodedFrame] = deque()
        self._bytes = 0
        self._is_finished = False
        self._has_frames = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_full = False
        self._on_drained = on_drained

    def put(self, frame: EncodedFrame) -> bool:
        """Add a frame; return False if the buffer is full now.

        The frame is added in either case, but the caller should then stop until `on_drained` is
        called.
        """
        self._frames.append(frame)
        self._bytes += getsizeof(frame) + OVERHEAD_BYTES
        self._has_frames.set()
        if self._bytes > LIMIT_BYTES and not self._is_full:
            self._is_full = True
            self._has_room.clear()
        return not self._is_full

    def finish(self) -> None:
        """Let `run` return once all frames are written; put nothing afterwards. Idempotent."""
        self._is_finished = True
        self._has_frames.set()

    async def wait_for_room(self) -> None:
        """Wait, without limit, until the buffer is not full; return at once if it is not."""
        await self._has_room.wait()

    async def run(self, write: Write) -> None:
        """Write frames as they come, with `write`, one at a time; raises what `write` raises.

        Returns when `finish` was called and all frames are written; runs until cancelled otherwise.
        """
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
        self._on_drained()
