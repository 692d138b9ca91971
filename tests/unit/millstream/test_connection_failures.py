"""Each way in which a server cannot be asked is one line, without what the server has sent."""

from http.client import BadStatusLine, HTTPException, IncompleteRead, RemoteDisconnected
from urllib.error import URLError

import pytest

from millstream.connection_failures import describe_failure


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (URLError(TimeoutError("timed out")), "no answer in time"),
        (TimeoutError("The read operation timed out"), "no answer in time"),
        (URLError("unknown url type"), "unknown url type"),
        (RemoteDisconnected("closed"), "the connection was closed without an answer"),
        (IncompleteRead(b"secret", 5), "the answer broke off"),
        (BadStatusLine("INFO {}\r\n"), "what answers does not speak HTTP"),
    ],
)
def test_it_is_told_in_words(error: OSError | HTTPException, told: str) -> None:
    """Whatever wrapped it on the way."""
    assert describe_failure(error) == told
