"""Posts one webhook: over a connection of its own, to an address that was checked.

The name is resolved once, and what is connected to is an address that the policy has allowed: an
answer of the resolver that changes in between leads nowhere else. No redirect is followed and no
proxy used. What the endpoint answers is read up to the end of its head.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version

import httptools
import structlog

from registry.webhook_policy import (
    WebhookPolicy,
    WebhookRefused,
    WebhookTarget,
    parse_webhook_url,
)

log = structlog.get_logger()

CALL_SECONDS = 20.0  # from the resolver's question to the end of the answer's head
_MAX_HEAD = 65_536
# Threads: names whose servers do not answer keep one each for some seconds. So many that the
# endpoints of a few tenants do not take all of them
_RESOLVERS = 256
_REFUSED = "the host is not one to which webhooks may be sent"


@dataclass(frozen=True)
class WebhookAnswer:
    """Answer of an endpoint: its status, and for how many seconds it asks to be left alone.

    Without an answer `status` is None, and `error` says why.
    """

    status: int | None = None
    retry_after: float | None = None
    error: str = ""


class WebhookCaller:
    """Posts webhooks where a policy allows it; `call_seconds` is the most that one may take."""

    def __init__(self, policy: WebhookPolicy, call_seconds: float = CALL_SECONDS) -> None:
        self._policy, self._call_seconds = policy, call_seconds
        self._tls = ssl.create_default_context()
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "webhook-resolver")

    def close(self) -> None:
        """Wait for no name any more that is being resolved."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> WebhookAnswer:
        """Post JSON and return what was answered, or why nothing was; raises nothing."""
        try:
            async with asyncio.timeout(self._call_seconds):
                return await self._post(parse_webhook_url(url), headers, body)
        except TimeoutError:
            return WebhookAnswer(error=f"no answer within {self._call_seconds:g} s")
        except WebhookRefused as refused:
            log.warning("webhook_refused", reason=str(refused))
            return WebhookAnswer(error=_REFUSED)
        except ssl.SSLError as error:
            return WebhookAnswer(error=f"TLS failed: {error.reason or 'not trusted'}")
        except (OSError, UnicodeError, ValueError) as error:
            return WebhookAnswer(error=_describe(error))

    async def _post(
        self, target: WebhookTarget, headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        reader, writer = await self._connect(target)
        try:
            writer.write(_encode(target, headers, body))
            return await _read_answer(reader)
        finally:
            writer.transport.abort()

    async def _connect(
        self, target: WebhookTarget
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address that answers; raises `OSError` if none does."""
        self._policy.check_target(target)
        addresses = await self._resolve(target)
        self._policy.check_addresses(target, addresses)
        tls, name = (self._tls, target.host) if target.is_tls else (None, None)
        failure: OSError | None = None
        for address in addresses:
            try:
                return await asyncio.open_connection(
                    address, target.port, ssl=tls, server_hostname=name
                )
            except OSError as error:
                failure = error
        raise failure or OSError("the host has no address")

    async def _resolve(self, target: WebhookTarget) -> list[str]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._resolvers,
            lambda: socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM),
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _encode(target: WebhookTarget, headers: Mapping[str, str], body: bytes) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    default = 443 if target.is_tls else 80
    lines = {
        "Host": host if target.port == default else f"{host}:{target.port}",
        "User-Agent": f"millstream/{version('millstream')}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {target.path} HTTP/1.1\r\n{head}\r\n".encode() + body


class _HttpHead:
    """Collects what httptools tells of an answer; interim ones (1xx) are passed over."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.answer: WebhookAnswer | None = None
        self._retry_after: float | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = parse_retry_after(value.decode("latin-1"), datetime.now(UTC))

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200 and self.answer is None:
            self.answer = WebhookAnswer(status, self._retry_after)


async def _read_answer(reader: asyncio.StreamReader) -> WebhookAnswer:
    head, size = _HttpHead(), 0
    while head.answer is None:
        piece = await reader.read(_MAX_HEAD)
        size += len(piece)
        if not piece or size > _MAX_HEAD:
            raise ValueError("the connection was closed without an HTTP answer")
        try:
            head.parser.feed_data(piece)
        except httptools.HttpParserError:
            if head.answer is None:
                raise ValueError("the answer is no HTTP") from None
    return head.answer


def parse_retry_after(value: str, now: datetime) -> float | None:
    """Return the seconds that a `Retry-After` asks for, by its number or date; None for others."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (ValueError, TypeError):
        return None


def _describe(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the host cannot be resolved"
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        return f"no connection: {reason}"
    return str(error)
