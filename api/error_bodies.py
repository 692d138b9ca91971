"""Errors as clients see them: OpenAI's body over HTTP, an `error` frame's fields over WebSocket."""

import math
from typing import Any

from streams.errors import MillstreamError, http_status

JsonBody = dict[str, Any]
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def error_body(failure: MillstreamError) -> JsonBody:
    """Return OpenAI's JSON body of an error; `param` is the path of the field at fault, or null."""
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
    """Return `estimated_wait_ms`, if the request was refused for too long a wait; else empty."""
    wait = getattr(failure, "estimated_wait_seconds", None)
    return {} if wait is None else {"estimated_wait_ms": round(wait * 1000)}


def error_type(status: int) -> str:
    """Return the `type` that OpenAI's error bodies have for an HTTP status."""
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_fields(error: MillstreamError) -> JsonBody:
    """Return `code`, `message` and, if the request may be tried again, `retry_after_ms`.

    `estimated_wait_ms` is there as well if the request was refused for too long a wait.
    """
    fields: JsonBody = {"code": error.code, "message": error.message}
    if error.retry_after_seconds is not None:
        fields["retry_after_ms"] = round(error.retry_after_seconds * 1000)
    return fields | wait_estimate(error)


def retry_headers(error: MillstreamError) -> dict[str, str]:
    """Return `Retry-After` in whole seconds, at least 1; empty if a retry makes no sense."""
    if error.retry_after_seconds is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_seconds)))}
