"""Failures of connections to HTTP servers, in words for operators. Pure."""

from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from urllib.error import URLError


def describe_failure(error: OSError | HTTPException) -> str:
    """Return why a server could not be asked, in one line; nothing that it sent is quoted."""
    reason = error.reason if isinstance(error, URLError) else error
    match reason:
        case TimeoutError():
            return "no answer in time"
        case RemoteDisconnected():
            return "the connection was closed without an answer"
        case IncompleteRead():
            return "the answer broke off"
        case HTTPException():
            return "what answers does not speak HTTP"
        case OSError() if reason.strerror:
            return reason.strerror
        case _:
            return str(reason)
