"""WebSocket protocol that bounds unread input in bytes, frames and time.

uvicorn parses all bytes that have come at once, and answers each ping, whether its client reads or
not. Here one slice is parsed at a time, and none while the client does not read, or the application
has not taken the last message.
"""

import asyncio
import random
import secrets

import orjson
from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol
from websockets.typing import StatusLike

from api.error_bodies import error_body
from api.rate_limiter import RateLimiter
from gateway.metrics import CUT_CONNECTIONS
from gateway.server.write_coalescer import CoalescingTransport
from gateway.server.write_timeout import WriteTimeout
from streams.errors import BadRequest

SLICE_BYTES = 2048  # parsed at a time: some ms of work if it holds nothing but tiny frames
MESSAGE_TIMEOUT_SECONDS = 30.0  # for the rest of a message that has begun
EMPTY_BYTES = 64  # a smaller fragment counts as empty, as pings and pongs do: they carry nothing
EMPTY_FRAMES_PER_SECOND, EMPTY_FRAMES_BURST = 20, 500
# Random for each socket, so that sockets that came together are not pinged together
PING_INTERVAL_SECONDS = (30.0, 50.0)


class LenientServerProtocol(ServerProtocol):
    """Accepts a close between fragments (RFC 6455 §5.4), which `websockets` takes for an error.

    A handshake that it refuses gets an error in OpenAI's shape.
    """

    def reject(self, status: StatusLike, text: str) -> Response:
        response = super().reject(status, text)
        if response.status_code < 500:
            response.body = orjson.dumps(error_body(BadRequest(text.strip())))
            del response.headers["Content-Length"], response.headers["Content-Type"]
            response.headers["Content-Length"] = str(len(response.body))
            response.headers["Content-Type"] = "application/json"
        response.headers["X-Request-Id"] = secrets.token_hex(16)
        return response

    def recv_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class WebSocketProtocol(WriteTimeout, WebSocketsSansIOProtocol):
    """uvicorn's protocol for one WebSocket connection, with limits on what the client sends.

    Input is parsed in slices of `SLICE_BYTES`, and not while the client does not read its answers
    or the application has not taken the last message. A client that sends too many empty frames, or
    leaves a message unfinished for `MESSAGE_TIMEOUT_SECONDS`, is closed with code 1008.
    """

    _is_handshake_complete = False
    _message_timer: asyncio.TimerHandle | None = None
    _is_slice_scheduled = False  # the next slice will be parsed soon

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = CoalescingTransport(self.transport, self.loop)
        self.conn = LenientServerProtocol(max_size=self.config.ws_max_size, logger=self.logger)
        self.ping_interval = random.uniform(*PING_INTERVAL_SECONDS)
        self._unparsed = bytearray()  # read from the transport, and not parsed yet
        self._empty_frame_limiter = RateLimiter(EMPTY_FRAMES_PER_SECOND, EMPTY_FRAMES_BURST)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        self._cancel_message_timer()
        super().connection_lost(exc)

    @property
    def handshake_complete(self) -> bool:
        """True once the handshake was accepted or refused.

        uvicorn reads this when the application ends, and would log an error about a refused
        handshake if it were False.
        """
        return self._is_handshake_complete or (
            self.close_sent and self.initial_response is not None
        )

    @handshake_complete.setter
    def handshake_complete(self, completed: bool) -> None:
        self._is_handshake_complete = completed

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            self._parse_handshake(data)
        elif self._unparsed or len(data) > SLICE_BYTES:
            self._unparsed += data
            self._update_flow()
        else:
            self._parse(data)

    def eof_received(self) -> None:
        """Write what is buffered and close, because the client has sent its last byte.

        asyncio would close the inner transport after this, and what the coalescing one has buffered
        would be lost.
        """
        self.transport.close()

    async def receive(self) -> ASGIReceiveEvent:
        event = await super().receive()
        self._update_flow()
        return event

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_flow()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_flow()

    def handle_ping(self) -> None:
        self._count_empty_frame()
        super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self._count_empty_frame()
        super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if len(event.data) < EMPTY_BYTES:
            self._count_empty_frame()
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._cancel_message_timer()
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        """Close the connection because no pong came; uvicorn calls this after a ping's timeout.

        While input is waiting here unparsed, or parsing is paused, the pong may be in it: then
        another ping is sent later instead.
        """
        if self._is_parsing_paused or self._unparsed:
            self.stop_keepalive()
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    @property
    def _is_parsing_paused(self) -> bool:
        """True while a message is not taken by the application, or the client does not read."""
        return self.read_paused or not self.writable.is_set()

    def _parse_handshake(self, head: bytes) -> None:
        """Parse the head; if the parser refuses it, send its response, which uvicorn would not."""
        super().data_received(head)
        if not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _update_flow(self) -> None:
        """Pause or resume reading, and schedule the next slice if one may be parsed."""
        if self.transport.is_closing():
            return
        if self._is_parsing_paused or self._unparsed:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        if self._unparsed and not self._is_parsing_paused and not self._is_slice_scheduled:
            self._is_slice_scheduled = True
            self.loop.call_soon(self._parse_slice)

    def _parse_slice(self) -> None:
        self._is_slice_scheduled = False
        if not self._is_parsing_paused and not self.transport.is_closing():
            piece = bytes(self._unparsed[:SLICE_BYTES])
            del self._unparsed[:SLICE_BYTES]
            self._parse(piece)
            self._update_flow()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._message_timer is None and (self.conn.reader.buffer or self.frames):
            self._message_timer = self.loop.call_later(
                MESSAGE_TIMEOUT_SECONDS, self._on_message_timeout
            )

    def _on_message_timeout(self) -> None:
        self._message_timer = None
        if self._is_parsing_paused or self._unparsed:
            self._message_timer = self.loop.call_later(
                MESSAGE_TIMEOUT_SECONDS, self._on_message_timeout
            )
        elif self.conn.reader.buffer or self.frames:
            CUT_CONNECTIONS.labels("slow_message").inc()
            self._close_for_violation(
                f"the rest of a message did not come within {MESSAGE_TIMEOUT_SECONDS:g} s"
            )

    def _cancel_message_timer(self) -> None:
        if self._message_timer:
            self._message_timer.cancel()
            self._message_timer = None

    def _count_empty_frame(self) -> None:
        if self._empty_frame_limiter.reserve(self.loop.time()):
            CUT_CONNECTIONS.labels("empty_frames").inc()
            self._close_for_violation(
                f"more than {EMPTY_FRAMES_PER_SECOND} frames a second that carry nothing"
            )

    def _close_for_violation(self, reason: str) -> None:
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(CloseCode.POLICY_VIOLATION, reason)
            self.handle_parser_exception()
