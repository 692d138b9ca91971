"""Errors in Anthropic's shape: their bodies, types and statuses. Pure."""

from typing import Any

from streams.errors import MillstreamError, http_status

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = {"overloaded", "no_workers"}
# JSON schema of an error body, for OpenAPI documents
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "code"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "code": {"type": "string"},
            },
        },
        "request_id": {"type": "string"},
    },
}


def error_status(failure: MillstreamError) -> int:
    """Return the HTTP status of an error: 529 where the fleet is overloaded, else as everywhere."""
    return 529 if failure.code in _OVERLOADED else http_status(failure.code)


def error_body(failure: MillstreamError, request_id: str) -> dict[str, Any]:
    """Return the JSON body of an error response; `code` in it is the word of our own."""
    status = error_status(failure)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": failure.message, "code": failure.code}
    return {"type": "error", "error": error, "request_id": request_id}
