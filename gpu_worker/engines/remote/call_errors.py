"""Which failures of a call are worth another one, and what the others tell the client. Pure."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from gpu_worker.engines.engine import EngineError

MAX_MESSAGE = 500  # characters of a server's own words
MAX_RETRY_AFTER_SECONDS = 300.0  # a server that asks for more is asked once in so long
BUSY_STATUSES = frozenset({408, 425, 429})  # it works, and asks for patience
UNAVAILABLE_STATUSES = frozenset(
    {502, 503, 504}
)  # of a server, or a proxy before it, that cannot work just now
THROTTLING_STATUSES = frozenset({429, 503})
CLIENT_ERROR_STATUSES = frozenset({400, 409, 413, 414, 415, 422})


class RetryableError(Exception):
    """A call failed in a way that another one may not.

    `label` names it in metrics. `suspicious`: the request itself may be the cause, so it is not
    tried for ever. `alive`: the server works. `throttles`: it has more to do than it can.
    """

    def __init__(
        self,
        label: str,
        message: str,
        *,
        suspicious: bool = False,
        alive: bool = False,
        throttles: bool = False,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.label, self.suspicious, self.alive = label, suspicious, alive
        self.throttles, self.retry_after = throttles, retry_after


class RequestRejected(EngineError):
    """The server works, and does not want this request."""


def error_from_status(
    status: int, headers: Mapping[str, str], body: bytes, now: float
) -> Exception:
    """The `Fault`, or the `RequestRejected` that ends the request, of an answer that is not a success.

    `now` is epoch seconds, for a Retry-After that is a date.
    """
    message = f"the server answers {status}: {error_message(body)}"
    if status in BUSY_STATUSES or status in UNAVAILABLE_STATUSES or status == 500:
        return RetryableError(
            str(status),
            message,
            suspicious=status == 500,
            alive=status in BUSY_STATUSES,
            throttles=status in THROTTLING_STATUSES,
            retry_after=parse_retry_after(headers.get("retry-after", ""), now),
        )
    return rejection(status, message)


def rejection(status: int, message: str) -> RequestRejected:
    """The end of a request that the server does not want; a wrong key, say, is not the client's."""
    code = "upstream_refused" if status in CLIENT_ERROR_STATUSES else "upstream_failed"
    return RequestRejected(code, message)


def parse_retry_after(value: str, now: float) -> float:
    """Seconds from a Retry-After header (RFC 9110, 10.2.3): a number or a date; else 0."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value, now)
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS) if seconds == seconds else 0.0


def _seconds_until(date: str, now: float) -> float:
    try:
        when = parsedate_to_datetime(date)
    except ValueError:
        return 0.0
    zoned = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (zoned - datetime.fromtimestamp(now, UTC)).total_seconds()


def error_message(body: bytes) -> str:
    """A server's own words, bounded: the message of an error in JSON, else the text as it came."""
    text = body.decode(errors="replace").strip()
    try:
        text = _find_message(json.loads(text)) or text
    except (ValueError, RecursionError):
        pass
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _find_message(content: object) -> str:
    """Of `{"error": {"message": …}}`, `{"error": …}`, `{"message": …}` or `{"detail": …}`."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            content = content[key]
    return content if isinstance(content, str) else json.dumps(content)
