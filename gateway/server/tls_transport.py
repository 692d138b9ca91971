"""The transport of a connection with TLS, which ends as one without TLS does.

uvloop's own waits at its end until the client closes too, and cannot close only its sending side.
"""

import asyncio
import struct
import termios
from fcntl import ioctl

from gateway.server.transport_wrapper import WrappedTransport

WRITE_BUFFER_BYTES = (
    64 * 1024
)  # written and not sent, before the protocol is paused; as in the open
LINGER_SECONDS = 1.0  # for a client to close, once it has all that was written


class TlsTransport(WrappedTransport):
    """A transport with TLS that closes within a bounded time, whatever its client does."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport, loop)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)

    def close(self) -> None:
        """Write what is buffered and TLS's own end, and take nothing more; idempotent.

        What the client still sends is read and dropped, so that it gets what was written. It is
        aborted `LINGER_SECONDS` after it has received that, if it has not closed by then; the
        kernel ends a connection whose client receives nothing.
        """
        if not self.is_closing():
            super().close()
            self._loop.call_later(LINGER_SECONDS, self._abort_once_received)

    def write_eof(self) -> None:
        """Close, since with TLS there is no end of the sending side alone."""
        self.close()

    def _abort_once_received(self) -> None:
        connection = self.get_extra_info("socket")
        if connection is None:
            return  # closed by the client, or lost
        if self.get_write_buffer_size() or _unacknowledged_bytes(connection.fileno()):
            self._loop.call_later(LINGER_SECONDS, self._abort_once_received)
        else:
            self.abort()


def _unacknowledged_bytes(descriptor: int) -> int:
    """Bytes in the kernel that the client's machine has not acknowledged."""
    (size,) = struct.unpack("i", ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
    return int(size)
