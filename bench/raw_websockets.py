"""Minimal WebSocket clients, so cheap that thousands of them do not disturb a measurement."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Self, cast

import orjson

HANDSHAKE = (
    "GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: millstream.v1.json\r\nAuthorization: Bearer {key}\r\n\r\n"
)
TEXT, PING, PONG = 0x81, 0x89, 0x8A
NO_MASK = bytes(4)  # a mask that changes nothing
OnFrame = Callable[["RawWebSocket", dict[str, Any]], None]


class RawWebSocket(asyncio.Protocol):
    """A WebSocket to a gateway; `on_frame` gets each frame that comes."""

    transport: asyncio.Transport

    def __init__(self, on_frame: OnFrame) -> None:
        self._on_frame = on_frame
        self._data = b""
        self.open = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(
        cls, port: int, key: str, on_frame: OnFrame, buffer: int | None = None
    ) -> Self:
        """Connect and return the socket after its handshake.

        `buffer` limits the bytes that the kernel receives for it.
        """
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        _, peer = await loop.create_connection(lambda: cls(on_frame), sock=connection)
        peer.transport.write(HANDSHAKE.format(key=key).encode())
        await peer.open
        return peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.open.done():
            self.open.set_exception(exc or ConnectionError("refused"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self.open.done():
            head, end, self._data = self._data.partition(b"\r\n\r\n")
            assert b" 101 " in head + end, head
            self.open.set_result(None)
        while (frame := self._next_frame()) is not None:
            opcode, payload = frame
            if opcode == TEXT:
                self._on_frame(self, orjson.loads(payload))
            elif opcode == PING:
                self._write(PONG, payload)

    def send_frame(self, **frame: Any) -> None:
        """Send a frame with these fields; its JSON must be shorter than 126 bytes."""
        self._write(TEXT, orjson.dumps(frame))

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Opcode and payload of the next complete frame; None if there is none yet."""
        data = self._data
        if len(data) < 2:
            return None
        size, start = data[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(data[2:start], "big")
        if len(data) < start + size:
            return None
        self._data = data[start + size :]
        return data[0], data[start : start + size]

    def _write(self, opcode: int, payload: bytes) -> None:
        assert len(payload) < 126, "longer frames have another header"
        self.transport.write(bytes([opcode, 0x80 | len(payload)]) + NO_MASK + payload)


class StreamingClients:
    """WebSockets that each run one stream after another, with the times between their tokens."""

    def __init__(self, port: int, key: str, tokens: int) -> None:
        self._port, self._key, self._tokens = port, key, tokens
        self.peers: list[RawWebSocket] = []
        self._last: dict[RawWebSocket, float] = {}
        self._gaps: list[float] | None = None

    async def open(self, count: int, spread_seconds: float) -> None:
        """Open `count` sockets, spread over so many seconds, and start a stream on each."""
        for _ in range(count):
            peer = await RawWebSocket.connect(self._port, self._key, self._receive)
            self.peers.append(peer)
            self._start_stream(peer)
            await asyncio.sleep(spread_seconds / count)

    async def measure_gaps(self, seconds: float) -> list[float]:
        """Return the seconds between chunks, per token, of the next `seconds` on all sockets."""
        gaps: list[float] = []
        self._gaps = gaps
        await asyncio.sleep(seconds)
        self._gaps = None
        return gaps

    def close(self) -> None:
        """Drop all sockets."""
        for peer in self.peers:
            peer.transport.abort()

    def _start_stream(self, peer: RawWebSocket) -> None:
        peer.send_frame(type="generate", id="x", model="mock", prompt="x", max_tokens=self._tokens)

    def _receive(self, peer: RawWebSocket, frame: dict[str, Any]) -> None:
        if frame["type"] == "chunk":
            now = time.perf_counter()
            if self._gaps is not None and frame["index"]:
                self._gaps.append((now - self._last[peer]) / frame["count"])
            self._last[peer] = now
        elif frame["type"] in ("done", "error"):
            assert frame["type"] == "done", frame
            self._start_stream(peer)
