"""Write coalescer: joins all writes to a socket in one turn of the event loop into one system call.

uvloop's transports make one for each `write`, so for each token of each stream on a WebSocket.
"""

import asyncio

from gateway.server.transport_wrapper import WrappedTransport

MAX_BUFFERED_BYTES = 16 * 1024  # more is passed on at once, so that the transport can push back


class CoalescingTransport(WrappedTransport):
    """A transport that joins all writes of one turn of the event loop into one to `transport`.

    Once `MAX_BUFFERED_BYTES` are exceeded, they are written without waiting for the end of the
    turn. `close` writes what is buffered first; `abort` drops it.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport, loop)
        self._buffered: list[bytes] = []
        self._bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Buffer `data` until the turn of the event loop ends, or the buffer is full."""
        if not self._buffered:
            self._loop.call_soon(self._flush)
        self._buffered.append(bytes(data))
        self._bytes += len(data)
        if self._bytes > MAX_BUFFERED_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is buffered, and close the inner transport."""
        self._flush()
        super().close()

    def abort(self) -> None:
        """Drop what is buffered, and abort the inner transport at once."""
        self._buffered, self._bytes = [], 0
        super().abort()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that are buffered here and in the inner transport together."""
        return self._bytes + super().get_write_buffer_size()

    def _flush(self) -> None:
        written, self._buffered, self._bytes = self._buffered, [], 0
        if written and not self.is_closing():
            super().write(b"".join(written))
