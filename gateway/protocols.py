"""uvicorn's protocols with bounds of our own: an end to clients that do not read.

uvicorn waits for as long as a client likes to take what was written. The transport alone knows
whether anything is taken, and only it can drop what is not: closing would wait for the client too.
"""

import asyncio

import structlog
import uvicorn

from gateway.lobby import Lobby
from gateway.metrics import CUT
from gateway.stall import Stall

log = structlog.get_logger()

STALLED_SECONDS = 10.0  # a client that has taken nothing for so long is cut
LOOKS = 10  # in that time: what the kernel still takes after the first one is no reading


class Config(uvicorn.Config):
    """uvicorn's, with what our protocols share: who waits, and how many may be connected."""

    lobby: Lobby
    max_connections: int


class Impatient(asyncio.Protocol):
    """Watches a transport from when its buffer is full until it has room again."""

    transport: asyncio.Transport
    _watch: asyncio.TimerHandle | None = None
    _stall: Stall

    def pause_writing(self) -> None:
        super().pause_writing()
        now = asyncio.get_running_loop().time()
        self._stall = Stall(self.transport.get_write_buffer_size(), now)
        self._look_later()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(STALLED_SECONDS / LOOKS, self._look)

    def _look(self) -> None:
        left, now = self.transport.get_write_buffer_size(), asyncio.get_running_loop().time()
        if self._stall.seconds(left, now) < STALLED_SECONDS:
            self._look_later()
        else:
            log.warning("client_stalled", unread_bytes=left)
            CUT.labels("stalled").inc()
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._watch:
            self._watch.cancel()
