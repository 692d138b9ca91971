"""Connections of the HTTP client to hosts and addresses that the worker's settings allow.

A name is resolved once for each connection, and what is connected to is the address that was
checked: an answer of the resolver that changes in between leads nowhere else. This file alone
overrides a private member of the HTTP library.
"""

import asyncio
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore2
import httpx2
import structlog

from gpu_worker.engines.engine import EngineError
from registry.destination_policy import DestinationPolicy, DestinationRefused

log = structlog.get_logger()

_KEEPALIVE_SECONDS = 5.0
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


class CheckedTransport(httpx2.AsyncHTTPTransport):
    """A transport with at most `connections` connections, each made by a `CheckedBackend`.

    Variables such as HTTPS_PROXY are not followed, since a proxy would resolve names unchecked; the
    log says so. Certificates are checked by the authorities of SSL_CERT_FILE where it is set.
    """

    def __init__(self, policy: DestinationPolicy, connections: int) -> None:
        super().__init__(trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            max_connections=connections,
            keepalive_expiry=_KEEPALIVE_SECONDS,
            network_backend=CheckedBackend(policy),
        )
        if ignored := sorted(name for name in os.environ if name.lower() in _PROXY_VARIABLES):
            log.warning("proxies_ignored", variables=ignored)


class CheckedBackend(httpcore2.AnyIOBackend):
    """Resolves a host, checks it and its addresses against the policy, and connects to one."""

    def __init__(self, policy: DestinationPolicy) -> None:
        self._policy = policy

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address of `host` that answers, each within `timeout` seconds.

        Raises `EngineError`, and connects to nothing, if the policy refuses the host or any of its
        addresses. Raises httpcore's `ConnectError` or `ConnectTimeout` if none can be reached.
        """
        with _refusals_logged(host, port):
            self._policy.check_host(host, port)
            addresses = await self._resolve(host, port, timeout)
            self._policy.check_addresses(host, addresses)
        failure: httpcore2.ConnectError | httpcore2.ConnectTimeout | None = None
        for address in addresses:
            try:
                return await super().connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure or httpcore2.ConnectError(f"{host} has no address")

    async def _resolve(self, host: str, port: int, timeout: float | None) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise httpcore2.ConnectTimeout(f"{host} is not resolved in time") from None
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"{host} cannot be resolved: {error}") from error
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


@contextmanager
def _refusals_logged(host: str, port: int) -> Iterator[None]:
    """Turn a refusal into the error for the client, which is told no address; the log has it."""
    try:
        yield
    except DestinationRefused as refused:
        log.error("upstream_refused", host=host, port=port, reason=str(refused))
        raise EngineError(
            "upstream_failed", "the model's server is none that this worker may call"
        ) from None
