"""NATS connection that survives frozen and closed servers and keeps its subscriptions."""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from random import sample

import nats.errors
import structlog

from streams.broker.nats_client import PatchedNatsClient
from streams.broker.nats_wire import RawHandler
from streams.broker.reconnecting_subscription import BrokerSubscription, MessageHandler
from streams.errors import BrokerUnavailable
from streams.server_urls import parse_server_urls, redact

log = structlog.get_logger()

PING_SECONDS = 1  # a frozen server is noticed after three unanswered pings: in 3 to 4 s
OPEN_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_FLUSH_SECONDS = 2.5
_RETRY_SECONDS = 0.25


class ReconnectingClient:
    """NATS connection that reconnects when lost: `open` it, then `run` it in a task until `close`.

    The callbacks in `on_reconnect` and `on_disconnect` are called at each reconnect and disconnect.
    `url` has the servers' addresses without the credentials of the URL that was given.
    """

    def __init__(self, url: str, name: str) -> None:
        self._servers = parse_server_urls(url)
        self.url, self.name = self._servers.text, name
        self.connected_at = 0.0  # monotonic seconds
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_disconnect: list[Callable[[], None]] = []
        self._client = PatchedNatsClient()
        self._subscriptions: list[BrokerSubscription] = []
        self._is_closing = False
        self._last_error = ""  # the last one since there was a connection
        self._rebuild_needed = asyncio.Event()

    @property
    def client(self) -> PatchedNatsClient:
        """nats-py's current client; get it again for each use, since it may be replaced."""
        return self._client

    @property
    def is_connected(self) -> bool:
        """True while there is a connection to a server; the server itself may have frozen."""
        return self._client.is_connected

    async def is_responsive(self, seconds: float) -> bool:
        """Return whether the server answers a ping within `seconds`; False without a connection."""
        if not self.is_connected:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._client.flush()
        except (nats.errors.Error, OSError, TimeoutError):
            return False
        return True

    async def has_listener(self, subject: str, seconds: float) -> bool:
        """Send an empty request; return False only if the server says that nobody listens.

        Returns True if a listener answers, and also if no answer comes within `seconds`.
        """
        try:
            await self._client.request(subject, timeout=seconds)
        except nats.errors.NoRespondersError:
            return False
        except (nats.errors.Error, OSError, TimeoutError):
            return True
        return True

    async def open(self, seconds: float = OPEN_SECONDS) -> None:
        """Connect with a new client and renew all subscriptions.

        All servers are tried again and again, for `seconds`; each new reason is logged. Raises
        `BrokerUnavailable` with the last one.
        """
        client = PatchedNatsClient()
        self._last_error = ""
        try:
            async with asyncio.timeout(seconds):
                await self._connect(client)
            self._client, self.connected_at = client, time.monotonic()
            for subscription in list(self._subscriptions):
                await subscription.resubscribe()
        except (OSError, nats.errors.Error, TimeoutError) as error:
            await client.close()
            reason = self._last_error or _describe_failure(error)
            raise BrokerUnavailable(
                f"no connection to NATS at {self.url} within {seconds:g} s: {reason}; "
                "start the server, or name another with --nats"
            ) from error
        self._last_error = ""

    async def _connect(self, client: PatchedNatsClient) -> None:
        servers = self._servers
        await client.connect(
            sample(servers.addresses, len(servers.addresses)),
            user=servers.user,
            password=servers.password,
            token=servers.token,
            name=self.name,
            dont_randomize=True,  # so that a reconnect tries the server that was lost last
            ping_interval=PING_SECONDS,
            max_outstanding_pings=3,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # an int to nats-py, but only slept
            connect_timeout=2,
            allow_reconnect=True,
            reconnected_cb=self._on_reconnected,
            disconnected_cb=self._on_disconnected,
            closed_cb=partial(self._on_closed, client),
            error_cb=partial(self._on_error, client),
        )

    async def close(self) -> None:
        """Send what is buffered and close the connection; idempotent.

        Takes two seconds at most: if the server does not answer by then, the buffer is lost.
        """
        self._is_closing = True
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                if self._client.is_connected:
                    await self._client.flush()
                await self._client.close()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            log.warning("nats_not_flushed", reason=repr(error))
            await self._client.abandon()

    async def run(self) -> None:
        """Replace nats-py's client whenever it has given up reconnecting; run until cancelled.

        nats-py itself reconnects after an ordinary loss. While no server answers, the attempt is
        repeated and nothing is raised.
        """
        while True:
            await self._rebuild_needed.wait()
            self._rebuild_needed.clear()
            try:
                await self._rebuild()
            except BrokerUnavailable as error:
                log.warning("nats_not_rebuilt", reason=str(error))
                self._rebuild_needed.set()
                await asyncio.sleep(_RETRY_SECONDS)

    async def subscribe(
        self, subject: str, handler: MessageHandler, queue: str = ""
    ) -> BrokerSubscription:
        """Subscribe, so that `handler` is awaited with each message until the subscription ends.

        Of all processes that subscribe with the same `queue`, one gets each message.

        The subscription is renewed after each reconnect; messages sent while there is no connection
        are missed. When this returns, the server has the subscription. Raises `BrokerUnavailable`
        if that fails.
        """
        return await self._start_subscription(
            subject, BrokerSubscription(self, subject, handler, queue=queue)
        )

    async def subscribe_raw(self, subject: str, handler: RawHandler) -> BrokerSubscription:
        """Subscribe as `subscribe` does, but with a handler that gets unparsed bytes.

        The read loop calls it directly, so it must neither block nor raise. Meant for the most
        frequent messages.
        """
        return await self._start_subscription(
            subject, BrokerSubscription(self, subject, raw_handler=handler)
        )

    async def _start_subscription(
        self, subject: str, subscription: BrokerSubscription
    ) -> BrokerSubscription:
        self._subscriptions.append(subscription)
        try:
            await subscription.resubscribe()
            await self._client.flush(_FLUSH_SECONDS)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await subscription.unsubscribe()
            raise BrokerUnavailable(f"not subscribed to {subject}: {error!r}") from error
        except asyncio.CancelledError:
            await subscription.unsubscribe()
            raise
        return subscription

    def remove_subscription(self, subscription: BrokerSubscription) -> None:
        """Forget a subscription, so that it is not renewed after a reconnect. Idempotent."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def _on_reconnected(self) -> None:
        log.info("nats_reconnected", server=self.url)
        self.connected_at, self._last_error = time.monotonic(), ""
        for callback in list(self.on_reconnect):
            callback()

    async def _on_disconnected(self) -> None:
        if self.connected_at and not self._is_closing:
            log.warning("nats_disconnected", server=self.url)
        for callback in list(self.on_disconnect):
            callback()

    async def _on_closed(self, client: PatchedNatsClient) -> None:
        if client is self._client and not self._is_closing:
            self._rebuild_needed.set()

    async def _on_error(self, client: PatchedNatsClient, error: Exception) -> None:
        """Log an error once while it repeats: a lost server is tried four times a second.

        Before there is a connection it is an error, which commands show, too.
        """
        reason = _describe_failure(error)
        if reason == self._last_error:
            return
        self._last_error = reason
        if client is self._client:
            log.warning("nats_error", server=self.url, error=reason)
        else:
            seconds = OPEN_SECONDS
            log.error("nats_unreachable", server=self.url, reason=reason, at_most_seconds=seconds)

    async def _rebuild(self) -> None:
        """Connect with a new client, since nats-py gave up, as after a protocol error."""
        await self.open()
        await self._on_reconnected()


def _describe_failure(error: Exception) -> str:
    """Say in a few words why there is no connection, or why a server closed it."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError | nats.errors.TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    return redact(str(error) or type(error).__name__).removeprefix("nats: ").strip("'")
