"""Errors as clients see them: OpenAI's body over HTTP, the fields of an `error` frame over WebSocket."""

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
    """An error's body; `param` is the path of the field at fault."""
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
    """The wait for which a request was refused, if it was."""
    wait = getattr(failure, "estimated_wait_seconds", None)
    return {} if wait is None else {"estimated_wait_ms": round(wait * 1000)}


def error_type(status: int) -> str:
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_fields(error: MillstreamError) -> JsonBody:
    """`code`, `message` and, if it may be tried again, `retry_after_ms`.

    With `estimated_wait_ms` if it was refused for that.
    """
    found: JsonBody = {"code": error.code, "message": error.message}
    if error.retry_after_seconds is not None:
        found["retry_after_ms"] = round(error.retry_after_seconds * 1000)
    return found | wait_estimate(error)


def retry_headers(error: MillstreamError) -> dict[str, str]:
    """`Retry-After` in whole seconds, where trying again makes sense."""
    if error.retry_after_seconds is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_seconds)))}
