"""The load client over WebSocket: many requests on a few sockets, at 1 to 3 µs per frame.

The protocol is `websockets` without its I/O; a thin asyncio driver hands each frame to the request
it belongs to, with no task or queue in between.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self, cast

import msgpack
import orjson
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from millstream.bench.load_client import (
    CLOSED,
    GAP,
    Clock,
    GatewayAddress,
    KeyRefused,
    LoadRequest,
    Unreachable,
)
from millstream.bench.load_statistics import Sample

KEY_REVOKED = "key_revoked"  # the reason with which a gateway closes a removed key's sockets
DATA = (Opcode.TEXT, Opcode.BINARY)


@dataclass(frozen=True)
class Codec:
    """An encoding of WebSocket frames (JSON or msgpack), one entry of `CODECS`.

    `subprotocol` is the name that asks the gateway for this encoding in the handshake, and `opcode`
    the type of the frames. `dumps` encodes a frame and `loads` decodes one.
    """

    subprotocol: Subprotocol
    opcode: Opcode
    dumps: Callable[[Any], bytes]
    loads: Callable[[Any], dict[str, Any]]


CODECS = {
    "json": Codec(Subprotocol("millstream.v1.json"), Opcode.TEXT, orjson.dumps, orjson.loads),
    "msgpack": Codec(
        Subprotocol("millstream.v1.msgpack"), Opcode.BINARY, msgpack.packb, msgpack.unpackb
    ),
}


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """A request that has not ended: the sample to fill, and a future that its end completes."""

    sample: Sample
    finished: "asyncio.Future[None]"

    def receive(self, frame: dict[str, Any], now: float) -> bool:
        """Record one frame in the sample; return True if it was the request's last."""
        kind, sample = frame["type"], self.sample
        if kind == "chunk":
            if frame["index"] != sample.tokens:
                return self.finish(now, GAP)
            sample.add_chunk(now, frame["count"])
            return False
        if kind == "done":
            sample.timing = frame.get("timing", {})
            sample.prompt_tokens = frame["usage"]["prompt_tokens"]
            return self.finish(now)
        if kind == "error":
            return self.finish(now, frame["code"])
        if kind == "started":
            sample.attempts = frame["attempt"]
        if kind == "accepted":
            sample.accepted, sample.request_id = now, frame["request_id"]
        return False

    def finish(self, now: float, code: str = "") -> bool:
        self.sample.finish(now, code)
        if not self.finished.done():
            self.finished.set_result(None)
        return True


class MultiplexedSocket(asyncio.Protocol):
    """One WebSocket to the gateway, shared by all requests of a load that run on it at a time.

    It is an asyncio protocol, used by `WebSocketClient`. `opened` is a future that completes when
    the gateway accepts the handshake, or fails with `KeyRefused` or an `Unreachable` that says why.
    `closed` completes when the connection has ended; requests that run then end with the code
    `connection_closed`.
    """

    def __init__(self, address: GatewayAddress, codec: Codec, clock: Clock) -> None:
        scheme = "wss" if address.uses_tls else "ws"
        uri = f"{scheme}://{address.host}:{address.port}{address.request_path('/v1/stream')}"
        self._protocol = ClientProtocol(
            parse_uri(uri), subprotocols=[codec.subprotocol], max_size=None
        )
        self._address, self._codec, self._clock = address, codec, clock
        self._requests: dict[str, _OpenRequest] = {}
        self._ids = itertools.count()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """True from the accepted handshake until either side begins to close the connection."""
        return self._protocol.state is State.OPEN and not self.closed.done()

    async def run_request(self, request: LoadRequest, sample: Sample) -> None:
        """Send one request, record the answer in `sample`, and return when the request has ended.

        An error is not raised: its code is recorded as `sample.code`, which is `connection_closed`
        if the connection ends first. Raises `KeyRefused` if it ended because the API key was
        removed. Cancelling asks the gateway to cancel the request, without waiting for its answer.
        """
        id = f"{next(self._ids):x}"
        open_request = self._requests[id] = _OpenRequest(
            sample, asyncio.get_running_loop().create_future()
        )
        self.send(_make_generate_frame(id, request))
        try:
            await open_request.finished
            if (close := self._protocol.close_rcvd) and close.reason == KEY_REVOKED:
                raise KeyRefused(self._address)
        except asyncio.CancelledError:
            self.send({"type": "cancel", "id": id})
            raise
        finally:
            self._requests.pop(id, None)

    def send(self, message: dict[str, Any]) -> None:
        """Encode one frame and write it to the socket; returns at once.

        If the socket is not open, the frame is dropped without an error. Nothing is lost by that,
        because all requests of a closed socket have ended.
        """
        if not self.is_open:
            return
        data = self._codec.dumps(message)
        if self._codec.opcode is Opcode.TEXT:
            self._protocol.send_text(data)
        else:
            self._protocol.send_binary(data)
        self._flush()

    def close(self) -> None:
        """Begin to close the socket by sending a close frame, and return at once. Idempotent.

        The future `closed` completes when the server has closed the connection in turn.
        """
        if self.is_open:
            self._protocol.send_close()
            self._flush()

    def abort(self) -> None:
        """Drop the connection at once, without a close frame. Idempotent."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        handshake = self._protocol.connect()
        for name, value in self._address.headers.items():
            handshake.headers[name] = value
        self._protocol.send_request(handshake)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        self._flush()
        now = self._clock()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                if event.opcode in DATA:
                    self._dispatch(self._codec.loads(event.data), now)
            elif isinstance(event, Response):
                self._handle_handshake(event)

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        now = self._clock()
        for open_request in self._requests.values():
            open_request.finish(now, CLOSED)
        self._requests.clear()
        if not self.opened.done():
            self.opened.set_exception(Unreachable(f"{self._address.url} closed the connection"))
        self.closed.set_result(None)

    def _handle_handshake(self, response: Response) -> None:
        """Complete `opened`: the answer is 101, or a refusal with its reason in the body."""
        if self.opened.done():
            return
        if self._protocol.handshake_exc is None:
            self.opened.set_result(None)
            return
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            self.opened.set_exception(KeyRefused(self._address))
            return
        body = bytes(response.body or b"")[:500].decode(errors="replace")
        self.opened.set_exception(
            Unreachable(f"{self._address.url} refused the WebSocket: {response.status_code} {body}")
        )

    def _dispatch(self, frame: dict[str, Any], now: float) -> None:
        open_request = self._requests.get(frame.get("id", ""))
        if open_request and open_request.receive(frame, now):
            del self._requests[frame["id"]]

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()


def _make_generate_frame(id: str, request: LoadRequest) -> dict[str, Any]:
    return {
        "type": "generate",
        "id": id,
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "priority": request.priority,
    }


class WebSocketClient:
    """The `BenchClient` over WebSocket, which spreads requests in turn over `sockets` connections.

    Entering the context opens all connections, and raises `Unreachable` or `KeyRefused` if one
    cannot be opened. A lost connection is opened again by the next request that is to use it.
    `codec` is a key of `CODECS`.
    """

    def __init__(self, address: GatewayAddress, codec: str, sockets: int, clock: Clock) -> None:
        self._address, self._codec, self._clock = address, CODECS[codec], clock
        self._sockets: list[MultiplexedSocket | None] = [None] * sockets
        self._locks = [asyncio.Lock() for _ in range(sockets)]
        self._turn = itertools.cycle(range(sockets))

    async def __aenter__(self) -> Self:
        for i in range(len(self._sockets)):
            await self._acquire_socket(i)
        return self

    async def __aexit__(self, *exception: object) -> None:
        opened = [socket for socket in self._sockets if socket]
        for socket in opened:
            socket.close()
        if opened:
            await asyncio.wait([socket.closed for socket in opened], timeout=1.0)
        for socket in opened:
            socket.abort()

    async def run_request(self, request: LoadRequest, sample: Sample) -> None:
        """Send one request and record the answer in `sample`; see `BenchClient.run_request`."""
        socket = await self._acquire_socket(next(self._turn))
        sample.sent = self._clock()
        await socket.run_request(request, sample)

    async def _acquire_socket(self, i: int) -> MultiplexedSocket:
        async with self._locks[i]:
            socket = self._sockets[i]
            if socket is None or not socket.is_open:
                socket = self._sockets[i] = await self._open_socket()
            return socket

    async def _open_socket(self) -> MultiplexedSocket:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(10):
                _, socket = await loop.create_connection(
                    lambda: MultiplexedSocket(self._address, self._codec, self._clock),
                    self._address.host,
                    self._address.port,
                    ssl=self._address.tls,
                )
                await socket.opened
        except OSError as error:  # includes TimeoutError
            raise Unreachable(f"cannot connect to {self._address.url}: {error}") from error
        return socket
