"""Which answers are worth another call, and what the others say to the client."""

import json

import pytest

from gpu_worker.engines.engine import EngineError
from gpu_worker.engines.remote.call_errors import (
    MAX_MESSAGE,
    MAX_RETRY_AFTER_SECONDS,
    RetryableError,
    error_from_status,
    error_message,
    parse_retry_after,
)

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_a_fault(status: int) -> None:
    """RFC 9110 and 8470: these say nothing against the request."""
    found = error_from_status(status, {"retry-after": "3"}, b"", NOW)
    assert isinstance(found, RetryableError)
    assert (found.label, found.retry_after) == (str(status), 3.0)
    assert found.alive == (status in (408, 425, 429))
    assert found.suspicious == (status == 500)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "upstream_refused"),
        (413, "upstream_refused"),
        (422, "upstream_refused"),
        (401, "upstream_failed"),
        (404, "upstream_failed"),
        (301, "upstream_failed"),
        (501, "upstream_failed"),
    ],
)
def test_what_will_not_pass_ends_the_request(status: int, code: str) -> None:
    """A wrong key or a wrong path is the operator's mistake, not the client's."""
    found = error_from_status(status, {}, b'{"error": {"message": "no such thing"}}', NOW)
    assert isinstance(found, EngineError)
    assert found.code == code
    assert "no such thing" in str(found)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("1.5", 1.5),
        ("-4", 0.0),
        ("nan", 0.0),
        ("inf", MAX_RETRY_AFTER_SECONDS),
        ("86400", MAX_RETRY_AFTER_SECONDS),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0),
        ("Tue, 14 Nov 2023 22:13:50", 30.0),
        ("Tue, 14 Nov 2023 22:13:00 GMT", 0.0),
        ("soon", 0.0),
        ("", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, seconds: float) -> None:
    """RFC 9110, 10.2.3; a day's pause, or nonsense, does not stop a worker for so long."""
    assert parse_retry_after(value, NOW) == seconds


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m", "type": "t"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b"<html>m</html>", "<html>m</html>"),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_the_servers_own_words_are_found(body: bytes, message: str) -> None:
    """OpenAI, Hugging Face, FastAPI and proxies each have their shape."""
    assert error_message(body) == message


def test_the_servers_words_are_bounded() -> None:
    """They are stored in the token log."""
    assert len(error_message(json.dumps({"error": "x" * 10**5}).encode())) == MAX_MESSAGE
