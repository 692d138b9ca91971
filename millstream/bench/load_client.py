"""The interface of a load's client, and what both kinds share: request, gateway address, errors."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

from millstream.bench.load_statistics import Sample
from streams.errors import MillstreamError

# Error codes of the client itself:
CLOSED = "connection_closed"  # before the answer was complete
GAP = "token_gap"  # a chunk did not continue where the last one ended


class Unreachable(MillstreamError):
    """The gateway cannot be reached or refuses; the message says which gateway and why."""

    code = "unreachable"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request that will be sent; its answer has exactly `output_tokens` tokens."""

    model: str
    prompt: list[int] | str
    output_tokens: int
    priority: str


@dataclass(frozen=True)
class GatewayAddress:
    """The gateway's base URL and the API key for it, if any."""

    url: str
    key: str | None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The URL's port, by default 443 for https and 80 for http."""
        return urlsplit(self.url).port or (443 if self.uses_tls else 80)

    @property
    def uses_tls(self) -> bool:
        return self.url.startswith("https:")

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP header with the API key; empty without one."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def request_path(self, tail: str) -> str:
        """Return the path of a request: that of the base URL, followed by `tail`."""
        return urlsplit(self.url).path.rstrip("/") + tail


Clock = Callable[[], float]


class BenchClient(Protocol):
    """Connections to one gateway, shared by all requests of a load."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def run_request(self, request: LoadRequest, sample: Sample) -> None:
        """Send one request and fill in `sample` until the request ends, in success or an error.

        An error is recorded as the sample's code. Cancelling cancels the request. Raises
        `Unreachable` only if no connection can be opened.
        """
