"""What a load asks for and the two kinds of client that ask: WebSocket and HTTP with SSE."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

from millstream.bench.load_statistics import Sample
from streams.errors import MillstreamError

CLOSED = "connection_closed"  # before the answer was complete
GAP = "token_gap"  # a chunk did not continue where the last one ended


class Unreachable(MillstreamError):
    """No connection to the gateway, or none that it accepts; the message says which and why."""

    code = "unreachable"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request as it will be sent; the answer has `output_tokens` tokens exactly."""

    model: str
    prompt: list[int] | str
    output_tokens: int
    priority: str


@dataclass(frozen=True)
class GatewayAddress:
    """Where the gateway is and with which key it opens."""

    url: str
    key: str | None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or (443 if self.uses_tls else 80)

    @property
    def uses_tls(self) -> bool:
        return self.url.startswith("https:")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def request_path(self, tail: str) -> str:
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

    async def run_request(self, ask: LoadRequest, sample: Sample) -> None:
        """Send one request and fill `sample` until it has ended, be it with an error code.

        Cancelling cancels the request. Raises `Unreachable` only where no connection is to be had.
        """
