"""Errors as clients see them: OpenAI's body over HTTP, an `error` frame's fields over WebSocket."""

import math
from typing import Any

from streams.errors import MillstreamError, http_status

JsonBody = dict[str, Any]
# Errors with a status that clients try again, where that cannot help: the time that the client gave
# is over, the day's quota is spent, or the request has broken every worker that tried it
_FINAL_CODES = {"deadline_exceeded", "insufficient_quota", "attempts_exhausted"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

# JSON schema of an error body, for OpenAPI documents
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def error_body(failure: MillstreamError) -> JsonBody:
    """Return the JSON body of an error response in OpenAI's shape.

    `param` is the path of the field at fault, null if the error is not about one field.
    `estimated_wait_ms` is added for a request that was refused because it would have waited too
    long.
    """
    return {
        "error": {
            "message": failure.message,
            "type": error_type(http_status(failure.code)),
            "param": getattr(failure, "field", None),
            "code": failure.code,
            **wait_estimate(failure),
        }
    }


def wait_estimate(failure: MillstreamError) -> JsonBody:
    """Return `{"estimated_wait_ms": ...}` for an error that knows how long the request would wait.

    Only a request that was refused for a long wait has such an error; for any other the result is
    empty.
    """
    wait = getattr(failure, "estimated_wait_seconds", None)
    return {} if wait is None else {"estimated_wait_ms": round(wait * 1000)}


def error_type(status: int) -> str:
    """Return the `type` that OpenAI's error bodies have for an HTTP status.

    Statuses without a name of their own give `invalid_request_error` below 500, else
    `server_error`.
    """
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_fields(error: MillstreamError) -> JsonBody:
    """Return the fields that describe an error in a WebSocket `error` frame.

    They are `code` and `message`; `retry_after_ms` if a retry may succeed; and `estimated_wait_ms`
    if the request was refused because it would have waited too long.
    """
    fields: JsonBody = {"code": error.code, "message": error.message}
    if error.retry_after_seconds is not None:
        fields["retry_after_ms"] = round(error.retry_after_seconds * 1000)
    return fields | wait_estimate(error)


def retry_headers(error: MillstreamError) -> dict[str, str]:
    """Return the headers that tell a client whether and when to try again; may be empty.

    `Retry-After` is in whole seconds and at least 1. `x-should-retry: false`, which OpenAI's SDKs
    obey, says that the same request would fail again.
    """
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if not _may_succeed_later(error.code):
        headers["X-Should-Retry"] = "false"
    return headers


def _may_succeed_later(code: str) -> bool:
    status = http_status(code)
    return code not in _FINAL_CODES and (status in (408, 429) or status >= 500)
