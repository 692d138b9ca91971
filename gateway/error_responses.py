"""Errors as clients see them: OpenAI's shape over HTTP, an `error` frame over WebSocket."""

import orjson
from starlette.responses import Response
from starlette.types import Send

from api.error_bodies import error_body, retry_headers
from streams.errors import MillstreamError, http_status


def error_response(error: MillstreamError) -> Response:
    """The HTTP answer of an error."""
    return Response(
        orjson.dumps(error_body(error)),
        http_status(error.code),
        headers=retry_headers(error),
        media_type="application/json",
    )


def parse_bearer(header: str) -> str | None:
    """The key in an Authorization header, whatever the case of its scheme."""
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


async def deny_websocket(send: Send, error: MillstreamError) -> None:
    """Refuse a WebSocket handshake with the HTTP answer of an error (ASGI's denial response)."""
    answer = error_response(error)
    await send(
        {
            "type": "websocket.http.response.start",
            "status": answer.status_code,
            "headers": answer.raw_headers,
        }
    )
    await send({"type": "websocket.http.response.body", "body": answer.body})
