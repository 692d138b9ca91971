"""Errors as HTTP responses in OpenAI's shape, also for WebSocket handshakes that are refused."""

import orjson
from starlette.responses import Response
from starlette.types import Send

from api.error_bodies import error_body, retry_headers
from streams.errors import MillstreamError, http_status


def error_response(error: MillstreamError) -> Response:
    """Return the HTTP response for an error: its status, OpenAI's JSON body, and `Retry-After`.

    `Retry-After` is missing if the error does not suggest a retry.
    """
    return Response(
        orjson.dumps(error_body(error)),
        http_status(error.code),
        headers=retry_headers(error),
        media_type="application/json",
    )


async def deny_websocket(send: Send, error: MillstreamError) -> None:
    """Refuse a WebSocket handshake: send the HTTP response for `error` instead of accepting.

    This uses ASGI's extension for denial responses.
    """
    response = error_response(error)
    await send(
        {
            "type": "websocket.http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
    )
    await send({"type": "websocket.http.response.body", "body": response.body})
