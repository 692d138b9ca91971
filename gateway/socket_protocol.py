"""WebSocket from strangers: what is read and not yet taken is bounded in bytes, frames and time.

uvicorn parses all that has come at once, and answers each ping, whether its client reads or not.
Here a slice is parsed at a time, and none while the client does not read or the last message was
not taken.
"""

import asyncio
import random

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.server import ServerProtocol

from gateway.gathered import Gathered
from gateway.metrics import CUT
from gateway.pace import Pace
from gateway.protocols import Impatient

SLICE_BYTES = 2048  # parsed at a time: some ms of work if it holds nothing but frames
MESSAGE_SECONDS = 30.0  # for the rest of a message that has begun
EMPTY_BYTES = 64  # a fragment of less is counted with pings and pongs: they carry nothing
EMPTY_PER_SECOND, EMPTY_AT_ONCE = 20, 500
PING_SECONDS = 30.0, 50.0  # each socket its own: those that came together are not pinged together


class Conversation(ServerProtocol):
    """A close may come between fragments (RFC 6455 §5.4), which `websockets` takes for an error."""

    def recv_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class SocketProtocol(Impatient, WebSocketsSansIOProtocol):
    """One WebSocket."""

    _completed = False
    _deadline: asyncio.TimerHandle | None = None
    _slicing = False  # the next slice will be parsed soon

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = Gathered(self.transport, self.loop)
        self.conn = Conversation(max_size=self.config.ws_max_size, logger=self.logger)
        self.ping_interval = random.uniform(*PING_SECONDS)
        self._rest = bytearray()  # read and not parsed
        self._empty = Pace(EMPTY_PER_SECOND, EMPTY_AT_ONCE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest.clear()
        self._stop_clock()
        super().connection_lost(exc)

    @property
    def handshake_complete(self) -> bool:
        """True for a refused one too: uvicorn would log an error for it."""
        return self._completed or (self.close_sent and self.initial_response is not None)

    @handshake_complete.setter
    def handshake_complete(self, completed: bool) -> None:
        self._completed = completed

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            self._shake_hands(data)
        elif self._rest or len(data) > SLICE_BYTES:
            self._rest += data
            self._steer()
        else:
            self._parse(data)

    def eof_received(self) -> None:
        """The transport closes itself after this; what is gathered goes first."""
        self.transport.close()

    async def receive(self) -> ASGIReceiveEvent:
        event = await super().receive()
        self._steer()
        return event

    def pause_writing(self) -> None:
        super().pause_writing()
        self._steer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._steer()

    def handle_ping(self) -> None:
        self._count_empty()
        super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self._count_empty()
        super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if len(event.data) < EMPTY_BYTES:
            self._count_empty()
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._stop_clock()
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        """No pong in time; where we do not read, or our ping waits, that says nothing."""
        if self._is_held or self._rest:
            self.stop_keepalive()
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    @property
    def _is_held(self) -> bool:
        """True while nothing is parsed: a message is not taken, or answers are not read."""
        return self.read_paused or not self.writable.is_set()

    def _shake_hands(self, head: bytes) -> None:
        """The parser refuses some heads by itself, and uvicorn would not send what it says."""
        super().data_received(head)
        if not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _steer(self) -> None:
        """Read on, parse on, or hold."""
        if self.transport.is_closing():
            return
        if self._is_held or self._rest:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        if self._rest and not self._is_held and not self._slicing:
            self._slicing = True
            self.loop.call_soon(self._parse_slice)

    def _parse_slice(self) -> None:
        self._slicing = False
        if not self._is_held and not self.transport.is_closing():
            piece = bytes(self._rest[:SLICE_BYTES])
            del self._rest[:SLICE_BYTES]
            self._parse(piece)
            self._steer()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is None and (self.conn.reader.buffer or self.frames):
            self._deadline = self.loop.call_later(MESSAGE_SECONDS, self._too_slow)

    def _too_slow(self) -> None:
        self._deadline = None
        if self._is_held or self._rest:
            self._deadline = self.loop.call_later(MESSAGE_SECONDS, self._too_slow)
        elif self.conn.reader.buffer or self.frames:
            CUT.labels("slow_message").inc()
            self._fail(f"the rest of a message did not come within {MESSAGE_SECONDS:g} s")

    def _stop_clock(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _count_empty(self) -> None:
        if self._empty.take(self.loop.time()):
            CUT.labels("empty_frames").inc()
            self._fail(f"more than {EMPTY_PER_SECOND} frames a second that carry nothing")

    def _fail(self, reason: str) -> None:
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(CloseCode.POLICY_VIOLATION, reason)
            self.handle_parser_exception()
