"""A subscription that outlives the client that carries it."""

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
    """Whoever has a client of the moment, and renews subscriptions when it changes."""

    @property
    def client(self) -> PatchedNatsClient: ...

    def remove_subscription(self, subscribed: "BrokerSubscription") -> None: ...


class BrokerSubscription:
    """A subscription of a `Broker`, whichever client carries it at the moment."""

    def __init__(
        self,
        broker: SubscriptionOwner,
        subject: str,
        handler: MessageHandler | None = None,
        direct: RawHandler | None = None,
    ) -> None:
        self._broker, self._subject = broker, subject
        self._handler, self._raw_handler = handler, direct
        self._subscription: Subscription | None = None

    async def resubscribe(self) -> None:
        """Subscribe at the broker's current client; raises what nats-py raises."""
        client = self._broker.client
        if self._raw_handler:
            self._subscription = await client.subscribe_raw(self._subject, self._raw_handler)
            return
        self._subscription = await client.subscribe(
            self._subject,
            cb=self._handler,
            pending_msgs_limit=_NO_LIMIT,
            pending_bytes_limit=_PENDING_BYTES,
        )

    async def unsubscribe(self) -> None:
        """No more messages; idempotent."""
        if subscription := self._detach():
            try:
                await subscription.unsubscribe()
            except nats.errors.Error:
                return  # its client has closed, and has forgotten it

    async def drain(self) -> None:
        """No more messages, once the handler has had those that are on their way. Idempotent."""
        if subscription := self._detach():
            try:
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await subscription.drain()  # type: ignore[no-untyped-call]
            except (nats.errors.Error, TimeoutError):
                return  # there is nothing to wait for: its client has closed, or hears nothing

    def _detach(self) -> Subscription | None:
        self._broker.remove_subscription(self)
        subscription, self._subscription = self._subscription, None
        return subscription
