"""NATS connection that survives frozen and closed servers and keeps its subscriptions.

Files of credentials and certificates may be replaced while it runs: a second connection is made by
the new ones, and the first is closed when nothing depends on it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import sample

import nats.errors
import structlog
from prometheus_client import Gauge

from streams import subjects
from streams.broker import refusals
from streams.broker.authentication import Authentication, Identity, inbox_prefix
from streams.broker.countdown import running_timeout
from streams.broker.inbox import STORE_SECONDS, Inbox
from streams.broker.nats_client import PatchedNatsClient
from streams.broker.nats_wire import RawHandler
from streams.broker.reconnecting_subscription import BrokerSubscription, MessageHandler, drain
from streams.connection_files import NO_FILES, ConnectionFiles
from streams.errors import BrokerMisconfigured, BrokerUnavailable, NotPermitted
from streams.server_urls import parse_server_urls

log = structlog.get_logger()
EXPIRY = Gauge(
    "millstream_nats_credentials_expire_timestamp_seconds",
    "When the credentials of the connection to NATS expire, in epoch seconds; 0: never.",
)

PING_SECONDS = 1  # a frozen server is noticed after three unanswered pings: in 3 to 4 s
OPEN_SECONDS = 10.0
FILE_CHECK_SECONDS = 5.0  # a file that has been replaced is taken up within this time
_CLOSE_SECONDS = 2.0
_FLUSH_SECONDS = 2.5
_RETRY_SECONDS = 0.25
_IMPORTS_SECONDS = 1.0  # until a server that has just started has what its accounts import
_OVERLAP_SECONDS = STORE_SECONDS  # for answers to what was asked over the connection before


class ReconnectingClient:
    """NATS connection that reconnects when lost: `open` it, then `run` it in a task until `close`.

    The callbacks in `on_reconnect` and `on_disconnect` are called at each reconnect and disconnect.
    `url` has the servers' addresses without the credentials of the URL that was given. `files` say
    who this process is and how it knows the servers; with an address that begins with `tls://`, or
    a file for TLS, nothing is sent before the TLS handshake. Raises `BrokerMisconfigured`.
    """

    def __init__(self, url: str, name: str, files: ConnectionFiles = NO_FILES) -> None:
        self._servers = parse_server_urls(url)
        if self._servers.has_credentials and files.identity:
            raise BrokerMisconfigured(
                f"the URL of NATS has credentials, and so has {files.identity}: give one of them"
            )
        self.url, self.name = self._servers.text, name
        self.connected_at = 0.0  # monotonic seconds
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_disconnect: list[Callable[[], None]] = []
        self._authentication = Authentication(files)
        self._fingerprint = self._authentication.fingerprint()  # of what the connection is made by
        self._client, self._inbox = PatchedNatsClient(), Inbox()
        self._subscriptions: list[BrokerSubscription] = []
        self._is_closing = False
        self._last_error: Exception | None = None  # the last one since there was a connection
        self._opening = asyncio.Lock()
        self._rebuild_needed = asyncio.Event()
        self._has_connected = asyncio.Event()  # since the subscriptions were last renewed

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
            async with running_timeout(seconds):
                await self._client.flush()
        except (nats.errors.Error, OSError, TimeoutError):
            return False
        return True

    async def has_listener(self, subject: str, seconds: float) -> bool | None:
        """Send an empty request; return True if a listener answers.

        Returns False if the server says that nobody listens, and None if no answer comes within
        `seconds`, or this user may not ask.
        """
        try:
            await self._client.request(subject, timeout=seconds)
        except nats.errors.NoRespondersError:
            return False
        except (nats.errors.Error, OSError, TimeoutError, NotPermitted):
            return None
        return True

    async def open(self) -> None:
        """Connect with a new client and renew all subscriptions.

        All servers are tried again and again, for `OPEN_SECONDS`; each new reason is logged. Raises
        `BrokerUnavailable` with the last one, and `BrokerMisconfigured` at once for a file of the
        connection that cannot be used.
        """
        fingerprint, identity = self._authentication.fingerprint(), self._authentication.check()
        inbox = Inbox(prefix=inbox_prefix(subjects.token(self.name), identity))
        client = PatchedNatsClient(self._authentication)
        self._last_error = None
        try:
            async with running_timeout(OPEN_SECONDS):
                await self._connect(client, inbox, identity)
            self._client, self._inbox, self.connected_at = client, inbox, time.monotonic()
            async with running_timeout(OPEN_SECONDS):
                await self._move(list(self._subscriptions), client)
        except (OSError, nats.errors.Error, TimeoutError) as error:
            await client.close()
            raise self._unavailable(self._last_error or error) from error
        self._fingerprint, self._last_error = fingerprint, None
        self._has_connected.set()
        _export_expiry(client.identity)

    async def _connect(
        self, client: PatchedNatsClient, inbox: Inbox, identity: Identity | None
    ) -> None:
        servers, files = self._servers, self._authentication.files
        await client.connect(
            sample(servers.addresses, len(servers.addresses)),
            user=servers.user,
            password=servers.password,
            token=servers.token,
            signature_cb=client.sign_nonce if files.identity else None,
            user_jwt_cb=client.user_jwt if files.creds else None,
            # Else a client that is given TLS talks plainly to a server without, and says nothing
            tls_handshake_first=(files.encrypts or servers.encrypts) and not servers.are_websockets,
            inbox_prefix=inbox.prefix,
            name=self.name,
            dont_randomize=True,  # so that a reconnect tries the server that was lost last
            ping_interval=PING_SECONDS,
            max_outstanding_pings=3,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # an int to nats-py, but only slept
            connect_timeout=2,
            allow_reconnect=True,
            reconnected_cb=self._on_reconnected,
            disconnected_cb=partial(self._on_disconnected, client, inbox),
            closed_cb=partial(self._on_closed, client),
            error_cb=partial(self._on_error, client, inbox),
        )
        await client.subscribe_raw(inbox.subject, inbox.receive)

    async def _move(
        self, subscriptions: Sequence[BrokerSubscription], client: PatchedNatsClient
    ) -> None:
        """Renew subscriptions with a client, and only then end those that they had before.

        For a moment both get the same messages: every handler bears a message twice.
        """
        found = [await each.resubscribe(client) for each in subscriptions]
        if before := [subscription for subscription in found if subscription]:
            await client.flush(_FLUSH_SECONDS)
            await asyncio.gather(*map(drain, before))

    def _unavailable(self, error: BaseException) -> BrokerUnavailable:
        reason = refusals.describe(error)
        remedy = refusals.remedy(error, self._authentication.files)
        return BrokerUnavailable(
            f"no connection to NATS at {self.url} within {OPEN_SECONDS:g} s: {reason}; {remedy}"
        )

    async def close(self) -> None:
        """Send what is buffered and close the connection; idempotent.

        Takes two seconds at most: if the server does not answer by then, the buffer is lost.
        """
        self._is_closing = True
        await _close(self._client)

    async def run(self) -> None:
        """Keep the connection until cancelled, by new clients where that is needed.

        nats-py itself reconnects after an ordinary loss. A client that has given up is replaced;
        while no server answers, the attempt is repeated and nothing is raised. When a file of the
        connection has changed, it is replaced before the old one is lost.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._replace_when_closed(), name="nats-closed")
            tasks.create_task(self._renew_after_connect(), name="nats-subscriptions")
            if self._authentication.files.all:
                tasks.create_task(self._follow_files(), name="nats-files")

    async def _replace_when_closed(self) -> None:
        reason = ""
        while True:
            await self._rebuild_needed.wait()
            self._rebuild_needed.clear()
            try:
                await self._rebuild()
            except (BrokerUnavailable, BrokerMisconfigured) as error:
                reason = _log_if_new("nats_not_rebuilt", error, reason)
                self._rebuild_needed.set()
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                reason = ""

    async def _renew_after_connect(self) -> None:
        """Subscribe once more a moment after each connect, where users belong to accounts.

        A server that has just started may take a subscription before it has what the account
        imports, when several users of one account come at once (`fetchAccount` in nats-server
        2.15.1). Such a subscription hears nothing, and nothing says so. One that has heard anything
        meanwhile is left as it is.
        """
        while True:
            await self._has_connected.wait()
            self._has_connected.clear()
            heard = {each: each.heard_count for each in self._subscriptions}
            await asyncio.sleep(_IMPORTS_SECONDS)
            if not (self._client.identity and self._client.identity.user_class):
                continue
            silent = [
                each for each in self._subscriptions if each.heard_count == heard.get(each, 0)
            ]
            try:
                async with self._opening, running_timeout(OPEN_SECONDS):
                    await self._move(silent, self._client)
            except (OSError, nats.errors.Error, TimeoutError) as error:
                log.info("nats_not_resubscribed", reason=repr(error))  # it will connect anew

    async def _follow_files(self) -> None:
        """Connect anew once a file has changed; warn if credentials end and nobody renews them."""
        reason, warned_of = "", None
        while True:
            await asyncio.sleep(FILE_CHECK_SECONDS)
            if self._authentication.fingerprint() != self._fingerprint:
                try:
                    await self._replace()
                except (BrokerUnavailable, BrokerMisconfigured) as error:
                    reason = _log_if_new("nats_not_renewed", error, reason)
                else:
                    reason = ""
            identity = self._client.identity
            _export_expiry(identity)
            if identity and identity.expires_soon and identity is not warned_of:
                warned_of = identity
                log.warning(
                    "nats_credentials_expire_soon",
                    file=str(self._authentication.files.identity),
                    expires_at=identity.expires_at,
                )

    async def _replace(self) -> None:
        """Connect by the files as they are now, then close the client before."""
        async with self._opening:
            before = self._client
            await self.open()
            log.info(
                "nats_renewed",
                server=self.url,
                files=[str(path) for path in self._authentication.files.all],
            )
            self._call_on_reconnect()
        try:
            await asyncio.sleep(_OVERLAP_SECONDS)
        finally:
            await _close(before)

    async def subscribe(
        self, subject: str, handler: MessageHandler, queue: str = "", *, renewed: bool = True
    ) -> BrokerSubscription:
        """Subscribe, so that `handler` is awaited with each message until the subscription ends.

        Of all processes that subscribe with the same `queue`, one gets each message.

        The subscription is renewed after each reconnect; messages sent while there is no connection
        are missed. With `renewed=False` it stays with the client of now, and ends with it. When
        this returns, the server has the subscription. Raises `BrokerUnavailable` if that fails.
        """
        return await self._start_subscription(
            subject, BrokerSubscription(self, subject, handler, queue=queue), renewed
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
        self, subject: str, subscription: BrokerSubscription, renewed: bool = True
    ) -> BrokerSubscription:
        client = self._client
        if renewed:
            self._subscriptions.append(subscription)
        try:
            await subscription.resubscribe(client)
            await client.flush(_FLUSH_SECONDS)
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
        self._has_connected.set()
        self.connected_at, self._last_error = time.monotonic(), None
        self._call_on_reconnect()

    def _call_on_reconnect(self) -> None:
        for callback in list(self.on_reconnect):
            callback()

    async def _on_disconnected(self, client: PatchedNatsClient, inbox: Inbox) -> None:
        inbox.fail(BrokerUnavailable("the connection to NATS was lost"))
        if client is not self._client:
            return
        if not self._is_closing:
            log.warning("nats_disconnected", server=self.url)
        for callback in list(self.on_disconnect):
            callback()

    async def _on_closed(self, client: PatchedNatsClient) -> None:
        """Have a client replaced that closed for good, as after a protocol error or a revocation.

        The server's reason comes only here: nats-py calls no other callback with it.
        """
        if client is not self._client or self._is_closing:
            return
        if client.last_error:
            log.warning("nats_closed", server=self.url, **self._explain(client.last_error))
        self._rebuild_needed.set()

    async def _on_error(self, client: PatchedNatsClient, inbox: Inbox, error: Exception) -> None:
        """Log an error once while it repeats: a lost server is tried four times a second.

        Before there is a connection it is an error, which commands show, too. There, a try without
        an answer tells less than an earlier one that was refused. What was asked on a subject to
        which this user may not publish ends with that reason.
        """
        if asked := refusals.forbidden_subject(error):
            explain = partial(refusals.not_permitted, identity=client.identity)
            inbox.refuse(asked, explain)
            client.refuse(asked, explain)
        last, is_opening = self._last_error, client is not self._client
        if last and is_opening and isinstance(error, TimeoutError):
            return
        self._last_error = error
        if last and refusals.describe(last) == refusals.describe(error):
            return
        if asked:
            log.error("nats_not_permitted", server=self.url, reason=str(explain(asked)))
        elif is_opening:
            log.error(
                "nats_unreachable",
                server=self.url,
                at_most_seconds=OPEN_SECONDS,
                **self._explain(error),
            )
        else:
            log.warning("nats_error", server=self.url, error=refusals.describe(error))

    def _explain(self, error: Exception) -> dict[str, str]:
        files = self._authentication.files
        return {"reason": refusals.describe(error), "remedy": refusals.remedy(error, files)}

    async def _rebuild(self) -> None:
        """Connect with a new client if nats-py gave up on this one."""
        async with self._opening:
            if self._client.is_closed:
                await self.open()
                await self._on_reconnected()


def _export_expiry(identity: Identity | None) -> None:
    EXPIRY.set(identity.expires_at or 0 if identity else 0)


async def _close(client: PatchedNatsClient) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            if client.is_connected:
                await client.flush()
            await client.close()
    except (nats.errors.Error, OSError, TimeoutError) as error:
        log.warning("nats_not_flushed", reason=repr(error))
        await client.abandon()


def _log_if_new(event: str, error: Exception, last: str) -> str:
    """Log why something failed, unless it is the reason of the last time; returns the reason."""
    if str(error) != last:
        log.warning(event, reason=str(error))
    return str(error)
