"""Errors of remote calls: which are worth a retry, and what the others tell the client. Pure."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from gpu_worker.engines.engine import EngineError

MAX_MESSAGE = 500  # characters of a server's own words
MAX_RETRY_AFTER_SECONDS = 300.0  # a server that asks for longer is still tried this often
BUSY_STATUSES = frozenset({408, 425, 429})  # the server works, and asks to be called later
UNAVAILABLE_STATUSES = frozenset({502, 503, 504})  # it, or a proxy before it, cannot work now
THROTTLING_STATUSES = frozenset({429, 503})
CLIENT_ERROR_STATUSES = frozenset({400, 409, 413, 414, 415, 422})


class RetryableError(Exception):
    """A call of another server failed in a way that another call may mend.

    `label` names the failure in metrics. `suspicious`: the request itself may be the cause, so it
    is not retried for ever. `alive`: the failure shows that the server works. `throttles`: the
    server has more to do than it can. `retry_after`: the seconds that the server asks to wait, 0 if
    it does not ask.
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
    """The server works and rejects this request, which is not tried again."""


def error_from_status(
    status: int, headers: Mapping[str, str], body: bytes, now: float
) -> Exception:
    """Return, without raising it, the error for an HTTP answer that is not a success.

    It is a `RetryableError` for 408, 425, 429, 500, 502, 503 and 504, else the `RequestRejected`
    that ends the request. `now` is epoch seconds, for a Retry-After that is a date.
    """
    answer = f"{status}, a redirect, and none is followed" if 300 <= status < 400 else f"{status}"
    message = f"the server answers {answer}: {error_message(body)}"
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
    """Return, without raising it, the error for a request that a server rejected with `status`.

    Its code is `upstream_refused` where the client can change the request, else `upstream_failed`:
    a wrong API key, say, is not the client's fault.
    """
    code = "upstream_refused" if status in CLIENT_ERROR_STATUSES else "upstream_failed"
    return RequestRejected(code, message)


def parse_retry_after(value: str, now: float) -> float:
    """Return the seconds to wait by a Retry-After header (RFC 9110, 10.2.3), from 0 to 300.

    The header is a number of seconds or a date, which is compared with `now` (epoch seconds). An
    empty or malformed header gives 0.
    """
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
    with_zone = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (with_zone - datetime.fromtimestamp(now, UTC)).total_seconds()


def error_message(body: bytes) -> str:
    """Return a server's own words from the body of an error answer, at most 500 characters.

    These are the message of an error in JSON, else the text as it came. Nothing is raised for a
    malformed body.
    """
    text = body.decode(errors="replace").strip()
    try:
        text = _find_message(json.loads(text)) or text
    except (ValueError, RecursionError):
        pass
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _find_message(content: object) -> str:
    """Return the text in `{"error": {"message": …}}` or in `error`, `message` or `detail` alone."""
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            content = content[key]
    return content if isinstance(content, str) else json.dumps(content)
