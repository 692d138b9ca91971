"""The WebSocket to a gateway: sends queued frames, hands on received ones, detects silence."""

import asyncio
import logging
from collections.abc import Callable

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from millstream_client.errors import (
    BY_CODE,
    Forbidden,
    MillstreamError,
    Unauthenticated,
    error_of,
)

log = logging.getLogger(__name__)

PING_SECONDS = 2.0
PONG_SECONDS = 3.0  # a gateway that does not answer a ping for longer is frozen or unreachable
_TOO_BIG, _PROTOCOL_ERROR = 1009, 1002
_POLICY_VIOLATION = 1008

_REFUSALS = {
    "key_revoked": "this API key was revoked",
    "key_expired": "this API key or token has expired",
}

OnMessage = Callable[[str | bytes], None]


class Connection:
    """One open WebSocket to the gateway at `url`, as `Connector.connect_next` returns it.

    Frames are sent and received only while `run` runs. The session sets `is_draining` when the
    gateway has announced that it shuts down.
    """

    def __init__(self, url: str, socket: ClientConnection) -> None:
        self.url, self._socket = url, socket
        self.is_draining = False
        self._outgoing: asyncio.Queue[str | None] = asyncio.Queue()

    @property
    def was_frame_too_big(self) -> bool:
        """True if the gateway closed the connection because a frame was larger than it accepts.

        False while the connection is open, and after any other end.
        """
        return self._socket.close_code == _TOO_BIG

    @property
    def refusal(self) -> MillstreamError | None:
        """The gateway's reason for closing the connection, if its key is not good any more."""
        code = str(self._socket.close_reason)
        named = BY_CODE.get(code, MillstreamError)
        is_refused = issubclass(named, (Unauthenticated, Forbidden))
        if self._socket.close_code != _POLICY_VIOLATION or not is_refused:
            return None
        return error_of({"code": code, "message": _REFUSALS.get(code, "this API key was refused")})

    def send(self, text: str) -> None:
        """Queue a frame and return at once; `run` sends the frames in order.

        A frame that is still queued when the connection ends is lost without an error.
        """
        self._outgoing.put_nowait(text)

    def close(self) -> None:
        """Tell `run` to close the connection after all frames queued before; returns at once.

        Idempotent. Frames queued later are not sent.
        """
        self._outgoing.put_nowait(None)

    def abort(self) -> None:
        """Drop the connection at once, without sending what is queued. Idempotent."""
        self._socket.transport.abort()

    async def run(self, receive: OnMessage) -> None:
        """Send queued frames and pass received ones to `receive` until the connection ends.

        The connection is closed with a protocol error if `receive` raises `ValueError`, `KeyError`,
        `TypeError` or `AttributeError` for a frame, and dropped if the gateway leaves a ping
        unanswered for `PONG_SECONDS` (3). Returns when the connection is lost or closed, and raises
        nothing then. Cancelling drops the connection at once.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write(), name="write")
                liveness = tasks.create_task(self._watch_liveness(tasks), name="watch")
                await self._read(receive)
                writing.cancel()
                liveness.cancel()
        finally:
            self.abort()

    async def _read(self, receive: OnMessage) -> None:
        try:
            async for data in self._socket:
                receive(data)
        except ConnectionClosed as closed:
            log.info("lost %s: %s", self.url, closed)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.exception("%s sent an invalid frame", self.url)
            await self._socket.close(_PROTOCOL_ERROR)

    async def _write(self) -> None:
        try:
            while (text := await self._outgoing.get()) is not None:
                await self._socket.send(text)
            await self._socket.close()
        except ConnectionClosed:
            pass  # `_read` ends by the same exception

    async def _watch_liveness(self, tasks: asyncio.TaskGroup) -> None:
        """Ping the gateway every 2 s; drop the connection if a pong does not come within 3 s.

        The ping is a task that is checked after that time, not cancelled by a timeout: if this
        process was too busy to read in time, the pong has been read by then.
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
