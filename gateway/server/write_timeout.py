"""Write timeout: aborts the connections of clients that do not read.

uvicorn waits without limit for a client to read what was written. Only the transport knows whether
anything is read, and only it can drop what is not: closing would wait for the client too.

A WebSocket is aborted soon, since its requests can be resumed. A client of HTTP that pauses costs
one response's buffers, so it has as long as its token log lives, unless too many pause at once:
then the one that has been paused longest is aborted.
"""

import asyncio

import structlog

from gateway.metrics import CUT_CONNECTIONS
from gateway.server.stall_timer import StallTimer

log = structlog.get_logger()

WRITE_TIMEOUT_SECONDS = 10.0  # a WebSocket whose client has read nothing for so long is aborted
# Several, since bytes that the kernel still takes after the first check were not read by the client
CHECKS_PER_TIMEOUT = 10


class WriteTimeout(asyncio.Protocol):
    """Mixin for uvicorn's protocols that aborts connections whose client does not read.

    A transport whose buffer has not shrunk for `write_timeout_seconds` is aborted.
    """

    transport: asyncio.Transport
    _write_check: asyncio.TimerHandle | None = None
    _stall_timer: StallTimer

    @property
    def write_timeout_seconds(self) -> float:
        """For so long a client may read nothing."""
        return WRITE_TIMEOUT_SECONDS

    def pause_writing(self) -> None:
        super().pause_writing()
        now = asyncio.get_running_loop().time()
        self._stall_timer = StallTimer(self.transport.get_write_buffer_size(), now)
        self._schedule_write_check()

    def resume_writing(self) -> None:
        self._cancel_write_check()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_write_check()
        super().connection_lost(exc)

    def _schedule_write_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._write_check = loop.call_later(
            self.write_timeout_seconds / CHECKS_PER_TIMEOUT, self._check_write_progress
        )

    def _check_write_progress(self) -> None:
        left, now = self.transport.get_write_buffer_size(), asyncio.get_running_loop().time()
        if self._stall_timer.stalled_seconds(left, now) < self.write_timeout_seconds:
            self._schedule_write_check()
        else:
            self._abort_stalled()

    def _abort_stalled(self) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        log.warning("client_stalled", unread_bytes=unread_bytes)
        CUT_CONNECTIONS.labels("stalled").inc()
        self.transport.abort()

    def _cancel_write_check(self) -> None:
        if self._write_check:
            self._write_check.cancel()
