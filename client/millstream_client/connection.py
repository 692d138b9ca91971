"""One socket while it lasts: what is put is sent, what comes is handed on, silence ends it."""

import asyncio
import logging
from collections.abc import Callable

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

log = logging.getLogger(__name__)

PING_SECONDS = 2.0
PONG_SECONDS = 3.0  # a gateway that is silent for longer is frozen, or out of reach
_TOO_BIG, _PROTOCOL_ERROR = 1009, 1002

OnMessage = Callable[[str | bytes], None]


class Connection:
    """A connection to the gateway at `url`; `draining` once that gateway wants to be left."""

    def __init__(self, url: str, socket: ClientConnection) -> None:
        self.url, self._socket = url, socket
        self.is_draining = False
        self._outgoing: asyncio.Queue[str | None] = asyncio.Queue()

    @property
    def was_frame_too_big(self) -> bool:
        """True if the gateway closed it because of the size of a frame."""
        return self._socket.close_code == _TOO_BIG

    def send(self, text: str) -> None:
        """Send a frame, some time after those before; lost if the socket is."""
        self._outgoing.put_nowait(text)

    def close(self) -> None:
        """Close it, when what was put is sent. Idempotent."""
        self._outgoing.put_nowait(None)

    def abort(self) -> None:
        """Drop it at once. Idempotent."""
        self._socket.transport.abort()

    async def run(self, receive: OnMessage) -> None:
        """Send and receive until it is lost or closed; what is no frame to `receive` ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write(), name="write")
                watching = tasks.create_task(self._watch_liveness(tasks), name="watch")
                await self._read(receive)
                writing.cancel()
                watching.cancel()
        finally:
            self.abort()

    async def _read(self, receive: OnMessage) -> None:
        try:
            async for data in self._socket:
                receive(data)
        except ConnectionClosed as closed:
            log.info("lost %s: %s", self.url, closed)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.exception("%s sent what is no frame", self.url)
            await self._socket.close(_PROTOCOL_ERROR)

    async def _write(self) -> None:
        try:
            while (text := await self._outgoing.get()) is not None:
                await self._socket.send(text)
            await self._socket.close()
        except ConnectionClosed:
            pass  # which ends the reading too

    async def _watch_liveness(self, tasks: asyncio.TaskGroup) -> None:
        """Drop a socket whose gateway does not answer.

        A task is looked at, rather than cancelled by a timeout: where it is this process that was
        busy, the pong is there by then.
        """
        while True:
            ping = tasks.create_task(self._ping(), name="ping")
            await asyncio.wait({ping}, timeout=PONG_SECONDS)
            if not ping.done():
                log.warning("%s is silent", self.url)
                ping.cancel()
                self.abort()
                return
            await asyncio.sleep(PING_SECONDS)

    async def _ping(self) -> None:
        try:
            await (await self._socket.ping())
        except ConnectionClosed:
            pass
