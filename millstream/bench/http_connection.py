"""A keep-alive HTTP/1.1 connection with as little code as possible between socket and caller.

The parser is `httptools`; the caller gets a body piece by piece, each with its time of arrival.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools
import orjson

from millstream.bench.load_client import CLOSED, Clock, GatewayAddress, Unreachable

OnBody = Callable[[bytes, float], None]


class KeepAliveConnection(asyncio.Protocol):
    """An HTTP/1.1 connection that is used for many requests, one at a time.

    Get one from `open_connection` and call `exchange` for each request. `is_open` is False once the
    connection is closed, or the server has announced in a response that it will close it; then no
    further request can be sent. `clock` returns the time, in seconds, that `on_body` gets.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._now = clock, 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._body_callback: OnBody = lambda body, now: None
        self._response: asyncio.Future[int] | None = None
        self.is_open = False

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send the bytes of one request, wait for the whole response, and return its HTTP status.

        `on_body` is called with each piece of the body and the clock's time at its arrival. Waits
        without a time limit. Raises `ConnectionError` if the connection ends before the response is
        complete, or if the response is not HTTP; an error status raises nothing. Cancelling closes
        the connection. Must not be called again before it has returned.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._body_callback = on_body
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._response
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection at once, discarding bytes that are not sent yet. Idempotent.

        A running `exchange` then raises `ConnectionError`.
        """
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error or CLOSED))

    def on_body(self, body: bytes) -> None:
        self._body_callback(body, self._now)

    def on_message_complete(self) -> None:
        self.is_open = self._parser.should_keep_alive()
        if self._response and not self._response.done():
            self._response.set_result(self._parser.get_status_code())

    def _fail(self, reason: str) -> None:
        self.close()
        if self._response and not self._response.done():
            self._response.set_exception(ConnectionError(reason))


async def open_connection(address: GatewayAddress, clock: Clock) -> KeepAliveConnection:
    """Open a new connection to the gateway, with TLS if its URL is https, and return it.

    `clock` is given to the connection. Raises `Unreachable` if connecting fails or takes longer
    than 10 s.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(10):
            _, connection = await loop.create_connection(
                lambda: KeepAliveConnection(clock), address.host, address.port, ssl=address.tls
            )
    except OSError as error:  # includes TimeoutError
        raise Unreachable(f"cannot connect to {address.url}: {error or 'timed out'}") from error
    return connection


def encode_request(method: str, address: GatewayAddress, path: str, body: bytes = b"") -> bytes:
    """Return the bytes of an HTTP/1.1 request to the gateway, ready for `exchange`.

    `path` is appended to the path of the gateway's URL. The API key of `address` is included if
    there is one. A non-empty `body` is declared as JSON.
    """
    fields = {"Host": f"{address.host}:{address.port}", **address.headers}
    if body:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{method} {address.request_path(path)} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def get_json(address: GatewayAddress, path: str, clock: Clock) -> tuple[int, Any]:
    """Send one GET on a new connection; return the HTTP status and the parsed JSON body.

    Raises `Unreachable` if there is no connection, no whole response, or a body that is not JSON.
    An error status raises nothing.
    """
    body = bytearray()
    connection = await open_connection(address, clock)
    try:
        status = await connection.exchange(
            encode_request("GET", address, path), lambda piece, now: body.extend(piece)
        )
        return status, orjson.loads(body)
    except (ConnectionError, ValueError) as error:
        raise Unreachable(f"GET {address.url}{path} failed: {error}") from error
    finally:
        connection.close()
