"""Errors as clients see them: OpenAI's shape over HTTP, an `error` frame over WebSocket."""

import math
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Send

from gateway import answers
from streams.errors import MillstreamError, status_of


def facts(error: MillstreamError) -> dict[str, Any]:
    """`code`, `message` and, if it may be tried again, `retry_after_ms`.

    With `estimated_wait_ms` if it was refused for that.
    """
    found: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.retry_after_seconds is not None:
        found["retry_after_ms"] = round(error.retry_after_seconds * 1000)
    return found | answers.estimate(error)


def headers(error: MillstreamError) -> dict[str, str]:
    """`Retry-After` in whole seconds, where trying again makes sense."""
    if error.retry_after_seconds is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_seconds)))}


def response(error: MillstreamError) -> Response:
    """The HTTP answer of an error."""
    return Response(
        orjson.dumps(answers.error(error)),
        status_of(error.code),
        headers=headers(error),
        media_type="application/json",
    )


def bearer(header: str) -> str | None:
    """The key in an Authorization header, whatever the case of its scheme."""
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


async def deny(send: Send, error: MillstreamError) -> None:
    """Refuse a WebSocket handshake with the HTTP answer of an error (ASGI's denial response)."""
    answer = response(error)
    await send(
        {
            "type": "websocket.http.response.start",
            "status": answer.status_code,
            "headers": answer.raw_headers,
        }
    )
    await send({"type": "websocket.http.response.body", "body": answer.body})
