"""Connects to one gateway after the other, with backoff."""

import json
from collections import deque
from collections.abc import Sequence
from random import sample
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.http11 import Response
from websockets.typing import Subprotocol

from millstream_client.backoff import Backoff
from millstream_client.connection import Connection
from millstream_client.errors import MillstreamError, NotConnected, error_of

OPEN_SECONDS = 3.0  # the kernel of a frozen gateway accepts connections that nobody then answers
CLOSE_SECONDS = 1.0
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_PROTOCOL = Subprotocol("millstream.v1.json")


class Connector:
    """Connects to the gateways in turn, in a random order so that clients spread over them.

    Each client has one, and calls `connect_next` after waiting for `delay` seconds. `len()` is the
    number of gateways. The constructor raises `ValueError` for an empty list or something that is
    not a gateway's URL.
    """

    def __init__(
        self, gateways: Sequence[str], api_key: str | None, ssl: SSLContext | None = None
    ) -> None:
        if not gateways:
            raise ValueError("name at least one gateway, like http://127.0.0.1:8080")
        self._urls = deque(sample([*map(_socket_url, gateways)], len(gateways)))
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._ssl = ssl
        self._backoff = Backoff(initial=0.1, maximum=2.0)
        self._failures = 0
        self._retry_after = 0.0

    def __len__(self) -> int:
        return len(self._urls)

    def delay(self) -> float:
        """Return how many seconds the caller should wait before the next `connect_next`.

        Returns 0 until each gateway has been tried once since the last that worked, and within each
        later round of tries. Between rounds the pause is random, up to 0.1 s at first and 2 s at
        most, or the time that the last refusal asked for if that is longer.
        """
        rounds, tried = divmod(self._failures, len(self._urls))
        return 0.0 if tried else max(self._retry_after, self._backoff.delay(rounds))

    def mark_working(self) -> None:
        """Forget all failures, so that `delay` is 0 again.

        To be called when the gateway that was connected last has sent a frame.
        """
        self._failures = 0

    async def connect_next(self) -> Connection:
        """Try once, for at most 3 s, to connect to the next gateway; return the open connection.

        Raises the `MillstreamError` that the gateway gives as its reason for refusing the
        connection, or `NotConnected` if it gives none or cannot be reached. The caller waits for
        `delay()` seconds beforehand.
        """
        url = self._urls[0]
        self._urls.rotate(-1)
        self._failures += 1
        self._retry_after = 0.0
        try:
            return Connection(url, await self._open_socket(url))
        except InvalidStatus as refusal:
            error = _handshake_error(url, refusal.response)
            self._retry_after = error.retry_after or 0.0
            raise error from None
        except (OSError, EOFError, WebSocketException) as error:
            raise NotConnected(f"{url}: {error or type(error).__name__}") from error

    async def _open_socket(self, url: str) -> ClientConnection:
        """Open a WebSocket without the library's own pings: `Connection` sends pings itself."""
        return await connect(
            url,
            subprotocols=[_PROTOCOL],
            additional_headers=self._headers,
            open_timeout=OPEN_SECONDS,
            close_timeout=CLOSE_SECONDS,
            ping_interval=None,
            compression=None,
            max_size=None,  # an answer to `embed` is as large as its inputs make it
            ssl=(self._ssl or True) if url.startswith("wss:") else None,
        )


def _socket_url(gateway: str) -> str:
    parts = urlsplit(gateway)
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise ValueError(f"a gateway is named like http://127.0.0.1:8080, not {gateway!r}")
    path = parts.path.rstrip("/") + "/v1/stream"
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, "", ""))


def _handshake_error(url: str, response: Response) -> MillstreamError:
    """The error in the body of a refused handshake; `NotConnected` for any other body."""
    try:
        facts: dict[str, Any] = json.loads(response.body or b"")["error"]
        error = error_of(facts)
    except (ValueError, KeyError, TypeError, AttributeError):
        return NotConnected(f"{url} answers HTTP {response.status_code}")
    seconds = response.headers.get("Retry-After", "")
    error.retry_after = float(seconds) if seconds.isdigit() else None
    return error
