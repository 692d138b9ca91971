"""Subscription that survives the nats-py client it was made with."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from streams.broker.nats_client import PatchedNatsClient
from streams.broker.nats_wire import RawHandler

MessageHandler = Callable[[Msg], Awaitable[None]]

_NO_LIMIT = 1 << 40  # messages; bytes bound what nats-py holds for a handler
_PENDING_BYTES = 256 * 2**20
_DRAIN_SECONDS = 1.0


class SubscriptionOwner(Protocol):
    """A connection that renews its subscriptions when it replaces its NATS client."""

    @property
    def client(self) -> PatchedNatsClient:
        """The current NATS client."""
        ...

    def remove_subscription(self, subscription: "BrokerSubscription") -> None:
        """Forget a subscription, so that it is not renewed after a reconnect. Idempotent."""
        ...


class BrokerSubscription:
    """A subscription on a connection, kept while the connection replaces its NATS client.

    `handler` gets nats-py's messages; `raw_handler`, if given, gets unparsed bytes instead. Of the
    subscriptions that name the same `queue`, one gets each message.
    """

    def __init__(
        self,
        broker: SubscriptionOwner,
        subject: str,
        handler: MessageHandler | None = None,
        raw_handler: RawHandler | None = None,
        queue: str = "",
    ) -> None:
        self._broker, self._subject, self._queue = broker, subject, queue
        self._handler, self._raw_handler = handler, raw_handler
        self._subscription: Subscription | None = None
        self._subscribing = asyncio.Lock()
        self._is_ended = False

    async def resubscribe(self, client: PatchedNatsClient) -> Subscription | None:
        """Subscribe with a client, and return the subscription with the one before, if any.

        The connection calls this at the start and for each new client. Raises what nats-py raises.
        """
        async with self._subscribing:
            made = await self._subscribe(client)
            before, self._subscription = self._subscription, made
        if self._is_ended:
            await self.unsubscribe()
        return before

    async def _subscribe(self, client: PatchedNatsClient) -> Subscription:
        if self._raw_handler:
            return await client.subscribe_raw(self._subject, self._raw_handler)
        return await client.subscribe(
            self._subject,
            self._queue,
            cb=self._handler,
            pending_msgs_limit=_NO_LIMIT,
            pending_bytes_limit=_PENDING_BYTES,
        )

    @property
    def heard_count(self) -> int:
        """Number of messages that have come on the present client; 0 with a raw handler."""
        return self._subscription.delivered if self._subscription else 0

    async def unsubscribe(self) -> None:
        """End the subscription at once: messages not yet handled are dropped. Idempotent."""
        if subscription := self._detach():
            try:
                await subscription.unsubscribe()
            except nats.errors.Error:
                return  # its client has closed, and the subscription with it

    async def drain(self) -> None:
        """End the subscription, but first handle the messages that are on their way. Idempotent.

        Waits for them for one second at most.
        """
        if subscription := self._detach():
            await drain(subscription)

    def _detach(self) -> Subscription | None:
        self._is_ended = True
        self._broker.remove_subscription(self)
        subscription, self._subscription = self._subscription, None
        return subscription


async def drain(subscription: Subscription) -> None:
    """End a subscription when the messages on their way are handled, within one second."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            await subscription.drain()  # type: ignore[no-untyped-call]
    except (nats.errors.Error, TimeoutError):
        return  # nothing to wait for: its client has closed, or the server is silent
