"""HTTP/1.1 protocol that bounds heads in bytes and time, and idle connections in number."""

import asyncio

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway import error_responses
from gateway.metrics import CUT_CONNECTIONS
from gateway.server.server_config import ServerConfig
from gateway.server.write_timeout import WriteTimeout
from streams.errors import BadRequest, HeadTooLarge, MillstreamError, Refused, TooSlow

# Time for the head of a request, from the last response or from the connection's begin
HEAD_TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 1.0  # a refusal is lost if the connection is closed while its client writes
MAX_HEAD_BYTES = 32_768
MAX_LINE_BYTES = 8_000  # as much as `websockets` takes
MAX_HEADERS = 100


class HttpProtocol(WriteTimeout, HttpToolsProtocol):
    """uvicorn's protocol for one HTTP/1.1 connection, with limits on the head of a request.

    The head must come within `HEAD_TIMEOUT_SECONDS` and be no larger than `MAX_HEAD_BYTES`. The
    connection counts as idle whenever no request is under way, and may then be evicted.
    """

    config: ServerConfig
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = False
    _unfinished_bytes = 0  # bytes that have come while the head was incomplete
    _head_bytes = 0  # bytes of the lines that the parser has found
    _refusal: MillstreamError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self.config.max_connections:
            self.config.idle_connections.evict_longest_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        super().data_received(data)
        if self._in_head and not self._refusal:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large("its head", MAX_HEAD_BYTES, "bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._unfinished_bytes, self._head_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head_bytes(len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head_bytes(len(name) + len(value) + len(": \r\n"))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_awaiting_head()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Answer with an error and close the connection; called when uvicorn's parser has stopped.

        The error is the limit that was exceeded, else `BadRequest` for bytes that are not HTTP/1.1.
        `msg`, uvicorn's own text, is not used.
        """
        self._refuse(self._refusal or BadRequest("this is not HTTP/1.1"))

    def evict(self) -> None:
        """Close this idle connection, because another one needs its place.

        The client gets an error response first if it has sent a part of a head, or has had no
        request on this connection yet.
        """
        CUT_CONNECTIONS.labels("crowded").inc()
        if self._in_head or self.cycle is None:
            self._write_error(Refused("this gateway has as many connections as it may"))
        self.transport.close()

    def _await_head(self) -> None:
        """Count as idle, and start the timer for the head of the next request."""
        self._stop_awaiting_head()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._on_head_timeout)
        self.config.idle_connections.add(self)

    def _stop_awaiting_head(self) -> None:
        self.config.idle_connections.discard(self)
        if self._head_timer:
            self._head_timer.cancel()

    def _on_head_timeout(self) -> None:
        if self._in_head:
            CUT_CONNECTIONS.labels("slow_head").inc()
            self._refuse(TooSlow("the head of the request", HEAD_TIMEOUT_SECONDS))
        else:
            self.transport.close()

    def _count_head_bytes(self, size: int) -> None:
        """Count one more line of a head; over a limit raise an error, which stops the parser."""
        self._head_bytes += size
        if size > MAX_LINE_BYTES:
            self._refusal = _head_too_large("a line of its head", MAX_LINE_BYTES, "bytes")
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _head_too_large("its head", MAX_HEAD_BYTES, "bytes")
        elif len(self.headers) > MAX_HEADERS:
            self._refusal = _head_too_large("its head", MAX_HEADERS, "headers")
        if self._refusal:
            raise self._refusal

    def _refuse(self, error: MillstreamError) -> None:
        """Answer an incomplete request with an error, and take no other request."""
        self._refusal = error
        self._stop_awaiting_head()
        if self.cycle and not self.cycle.response_complete:
            self.transport.abort()  # the error would become a part of the response under way
        elif not self.transport.is_closing():
            self._write_error(error)
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _write_error(self, error: MillstreamError) -> None:
        self.transport.write(_encode_response(error_responses.error_response(error)))


def _head_too_large(what: str, limit: int, unit: str) -> HeadTooLarge:
    return HeadTooLarge(f"{what} has more than {limit} {unit}")


def _encode_response(response: Response) -> bytes:
    """The bytes of a whole response after which the connection closes."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body)
