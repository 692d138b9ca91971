"""uvicorn's request and response, with what RFC 9110 and 9112 ask beyond it."""

import secrets
from collections.abc import Iterable
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway import error_responses
from streams.errors import MillstreamError


class ResponseCycle(RequestResponseCycle):
    """One request and its response.

    A client of HTTP/1.0 gets no chunks: a body of unknown length ends with the connection. After a
    response to a client that still waits for `100 Continue` the connection closes, since nobody
    knows whether the body will come.
    """

    _ends_with_connection = False

    @classmethod
    def adopt(cls, cycle: RequestResponseCycle) -> "ResponseCycle":
        """Turn a cycle that uvicorn has made, and that has not begun, into one of this class."""
        cycle.__class__ = cls
        adopted = cast(ResponseCycle, cycle)
        if adopted._is_http_1_0:
            adopted.waiting_for_100_continue = False
        return adopted

    @property
    def _is_http_1_0(self) -> bool:
        return self.scope["http_version"] == "1.0"

    async def send(self, message: ASGISendEvent) -> None:
        event = cast(dict[str, Any], message)
        if event["type"] == "http.response.start":
            if self.waiting_for_100_continue and self.more_body:
                self.keep_alive = False
            if self._is_http_1_0 and not _has_length(event.get("headers", ())):
                self.chunked_encoding, self._ends_with_connection = False, True
        elif self._ends_with_connection and event["type"] == "http.response.body":
            self.expected_content_length = len(event.get("body", b""))
        await super().send(message)


def _has_length(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-length" for name, _ in headers)


def encode_last_error(error: MillstreamError) -> bytes:
    """Return the bytes of a whole error response after which the connection closes."""
    response = error_responses.error_response(error)
    request_id = (b"x-request-id", secrets.token_hex(16).encode())
    headers = [*response.raw_headers, request_id, (b"connection", b"close")]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body)
