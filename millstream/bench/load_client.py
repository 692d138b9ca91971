"""The interface of a load's client, and what both kinds share: request, gateway address, errors."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

from millstream.bench.load_statistics import Sample
from streams.errors import MillstreamError

# Error codes of the client itself:
CLOSED = "connection_closed"  # before the answer was complete
GAP = "token_gap"  # a chunk did not continue where the last one ended


class Unreachable(MillstreamError):
    """The gateway cannot be reached, or it refused a connection or the list of its models.

    Also raised if a warm-up request fails. The message says why.
    """

    code = "unreachable"


class KeyRefused(MillstreamError):
    """The gateway does not know the API key, or there is none: no request of a load can succeed."""

    def __init__(self, address: "GatewayAddress") -> None:
        fault = "does not know the API key" if address.key else "wants an API key"
        super().__init__(
            f"{address.url} {fault} (401): give --api-key, or the --data-dir of its `millstream up`"
        )


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load, ready to send.

    `prompt` is a list of token ids or a text. The model is told to generate exactly `output_tokens`
    tokens, even past its end-of-text token.
    """

    model: str
    prompt: list[int] | str
    output_tokens: int
    priority: str


@dataclass(frozen=True)
class GatewayAddress:
    """The gateway's base URL, and the API key for it; None sends no key.

    `trust` says which certificates an https gateway may have, by default those that the system
    trusts, and has the client's own if there is one.
    """

    url: str
    key: str | None
    trust: ssl.SSLContext = field(default_factory=ssl.create_default_context, repr=False)

    @property
    def host(self) -> str:
        """The URL's host name; empty if it has none."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The URL's port; without one 443 for https and 80 for http."""
        return urlsplit(self.url).port or (443 if self.uses_tls else 80)

    @property
    def uses_tls(self) -> bool:
        """True for an https URL."""
        return self.url.startswith("https:")

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context to connect with; None for http."""
        return self.trust if self.uses_tls else None

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP header with the API key; empty if there is no key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def request_path(self, tail: str) -> str:
        """Return the path for an HTTP request: the path of the base URL, followed by `tail`.

        `tail` begins with a slash; a slash at the end of the base URL is dropped.
        """
        return urlsplit(self.url).path.rstrip("/") + tail


Clock = Callable[[], float]


class BenchClient(Protocol):
    """Sends the requests of a load to one gateway, over connections that they share.

    Open it with `async with`. Many calls of `run_request` may run at the same time.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def run_request(self, request: LoadRequest, sample: Sample) -> None:
        """Send one request, record the answer in `sample`, and return when the request has ended.

        `sample` then has the time of sending, the arrival of each chunk, and the end. A request
        that fails raises nothing: its error code is in `sample.code`, which is empty after success.
        Raises `Unreachable` only if no connection can be opened, and `KeyRefused` if the gateway
        does not know the API key (any more). Cancelling ends the request at the gateway, too.
        """
