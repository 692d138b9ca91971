"""HTTP/1.1 protocol that bounds heads in bytes and time, and idle connections in number."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.metrics import CUT_CONNECTIONS
from gateway.server import client_certificates
from gateway.server.idle_connections import IdleConnections
from gateway.server.response_framing import ResponseCycle, encode_last_error
from gateway.server.tls_transport import TlsTransport
from gateway.server.write_timeout import WriteTimeout
from streams import topology
from streams.errors import BadRequest, HeadTooLarge, MillstreamError, Refused, TooSlow

# Time for the head of a request from its first byte, and for that from the connection's begin
HEAD_TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS = float(topology.LOG_SECONDS)  # a client that reads nothing for so long is aborted
LINGER_SECONDS = 1.0  # a refusal is lost if the connection is closed while its client writes
MAX_HEAD_BYTES = 32_768
MAX_LINE_BYTES = 8_000  # as much as `websockets` takes
MAX_HEADERS = 100
TCP_TIMEOUT_SECONDS = 20  # for so long the client's machine may leave bytes unacknowledged


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with what all connections share, and the most of them at once.

    `paused_clients` are those of HTTP that do not read at the moment.
    """

    idle_connections: IdleConnections
    paused_clients: IdleConnections
    max_connections: int


@dataclass(eq=False)
class PausedClient:
    """A client that does not read its response at the moment."""

    evict: Callable[[], None]


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
        if ssl_object := transport.get_extra_info("ssl_object"):
            transport = TlsTransport(transport, self.loop)
            self.app_state = {**self.app_state, **client_certificates.read_state(ssl_object)}
        super().connection_made(transport)
        self._paused_client = PausedClient(self._abort_stalled)
        self._await_head(HEAD_TIMEOUT_SECONDS)
        if len(self.connections) > self.config.max_connections:
            self.config.idle_connections.evict_longest_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_head()
        self.config.paused_clients.discard(self._paused_client)
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Write what is buffered and close, because the client has sent its last byte."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._in_head and not self._refusal:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large("its head", MAX_HEAD_BYTES, "bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._unfinished_bytes, self._head_bytes = True, 0, 0
        if self._head_timer:
            self._await_head(HEAD_TIMEOUT_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head_bytes(len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head_bytes(len(name) + len(value) + len(": \r\n"))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_awaiting_head()
        if problem := self._find_head_problem():
            self._refusal = BadRequest(problem)
            raise self._refusal
        if self.parser.should_upgrade():
            return  # without the request's body, which the parser takes for another protocol's
        super().on_headers_complete()
        self.cycle = ResponseCycle.adopt(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if is_last and self._refusal:
            self._end(self._refusal)
        elif self.cycle.response_complete:
            # of the next head, or of a body that is dropped as it comes
            rest_is_due = self._in_head or self.cycle.more_body
            self._await_head(HEAD_TIMEOUT_SECONDS if rest_is_due else self.timeout_keep_alive)

    def send_400_response(self, msg: str) -> None:
        """Answer with an error and close the connection; called when uvicorn's parser has stopped.

        The error is the limit that was exceeded, else `BadRequest` for bytes that are not HTTP/1.1.
        `msg`, uvicorn's own text, is not used.
        """
        self._refuse(self._refusal or BadRequest("this is not HTTP/1.1"))

    def _find_head_problem(self) -> str | None:
        """Return why the head of a request is invalid (RFC 9110, 9112), or None."""
        is_http_1_1 = self.parser.get_http_version() == "1.1"
        hosts, codings = self._header_values(b"host"), self._header_tokens(b"transfer-encoding")
        if len(hosts) > 1 or (is_http_1_1 and not hosts):
            return f"a request has one Host header, this one has {len(hosts)}"
        if codings and (codings != [b"chunked"] or not is_http_1_1):
            return "the only transfer coding is `chunked`, in HTTP/1.1"
        if self.parser.get_method() == b"CONNECT":
            return "CONNECT is for proxies, and this is none"
        return self._find_handshake_problem() if self._asks_for_websocket() else None

    def _find_handshake_problem(self) -> str | None:
        """Return why the head of a WebSocket handshake is invalid (RFC 6455), or None."""
        if self.parser.get_method() != b"GET":
            return "a WebSocket handshake is a GET"
        lengths = self._header_values(b"content-length")
        if self._header_values(b"transfer-encoding") or any(each.strip(b"0") for each in lengths):
            return "a WebSocket handshake has no body"
        return None

    def _header_values(self, name: bytes) -> list[bytes]:
        return [value for header, value in self.headers if header == name]

    def _header_tokens(self, name: bytes) -> list[bytes]:
        """The comma-separated tokens of a header, in lower case."""
        values = b",".join(self._header_values(name)).lower().split(b",")
        return [token.strip() for token in values if token.strip()]

    def _asks_for_websocket(self) -> bool:
        return (
            self.parser.get_http_version() == "1.1"
            and b"upgrade" in self._header_tokens(b"connection")
            and b"websocket" in self._header_tokens(b"upgrade")
        )

    def _parse(self, data: bytes) -> None:
        """Feed the parser; a request to upgrade to anything but WebSocket is parsed without it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_for_websocket():
                self.scope["method"] = "GET"
                self.handle_websocket_upgrade()
            else:
                self._parse(self._restart_without_upgrade() + data[upgrade.args[0] :])

    def _restart_without_upgrade(self) -> bytes:
        """Start a new parser; returns the head of the request that was parsed, without upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        dropped = (b"upgrade", b"http2-settings")
        lines += [b"%s: %s" % each for each in self.headers if each[0] not in dropped]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def evict(self) -> None:
        """Close this idle connection, because another one needs its place.

        The client gets an error response first if it has sent a part of a head, or has had no
        request on this connection yet.
        """
        CUT_CONNECTIONS.labels("crowded").inc()
        if self._in_head or self.cycle is None:
            self._write_error(Refused("this gateway has as many connections as it may"))
        self.transport.close()

    @property
    def write_timeout_seconds(self) -> float:
        return PAUSE_SECONDS

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_unacknowledged(PAUSE_SECONDS)
        self.config.paused_clients.add(self._paused_client)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.config.paused_clients.discard(self._paused_client)
        self._bound_unacknowledged(TCP_TIMEOUT_SECONDS)

    def _bound_unacknowledged(self, seconds: float) -> None:
        """Have the kernel close the connection after so long without acknowledged bytes.

        It counts what a client's machine has no room for, too.
        """
        if connection := self.transport.get_extra_info("socket"):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000)
            )

    def _await_head(self, seconds: float) -> None:
        """Count as idle, and close unless the next step of a head has come after `seconds`."""
        self._stop_awaiting_head()
        self._head_timer = self.loop.call_later(seconds, self._on_head_timeout)
        self.config.idle_connections.add(self)

    def _stop_awaiting_head(self) -> None:
        self.config.idle_connections.discard(self)
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

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
        """Answer an incomplete request with an error, and take no other request.

        The requests before it get their responses first.
        """
        self._refusal = error
        self._stop_awaiting_head()
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._end(None if cycle and cycle.more_body else error)
        elif not cycle.more_body:
            pass  # an earlier request, whole: `on_response_complete` goes on
        elif self.pipeline:
            self.pipeline.popleft()  # the request at fault, which has not begun
        elif cycle.response_started:
            self.transport.abort()  # the error would become a part of the response under way
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._end(error)

    def _end(self, error: MillstreamError | None) -> None:
        """Write the error, if any, as the last response, and close once the client may have it."""
        if not self.transport.is_closing():
            if error:
                self._write_error(error)
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _write_error(self, error: MillstreamError) -> None:
        self.transport.write(encode_last_error(error))


def _head_too_large(what: str, limit: int, unit: str) -> HeadTooLarge:
    return HeadTooLarge(f"{what} has more than {limit} {unit}")
