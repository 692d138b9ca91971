"""A subscription that outlives the client that carries it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from streams.client import Client
from streams.protocol import DirectHandler

Handler = Callable[[Msg], Awaitable[None]]

_NO_LIMIT = 1 << 40  # messages; bytes bound what nats-py holds for a handler
_PENDING_BYTES = 256 * 2**20
_DRAIN_SECONDS = 1.0


class Carrier(Protocol):
    """Whoever has a client of the moment, and renews subscriptions when it changes."""

    @property
    def client(self) -> Client: ...

    def forget(self, subscribed: "Subscribed") -> None: ...


class Subscribed:
    """A subscription of a `Broker`, whichever client carries it at the moment."""

    def __init__(
        self,
        broker: Carrier,
        subject: str,
        handler: Handler | None = None,
        direct: DirectHandler | None = None,
    ) -> None:
        self._broker, self._subject = broker, subject
        self._handler, self._direct = handler, direct
        self._subscription: Subscription | None = None

    async def renew(self) -> None:
        """Subscribe at the broker's current client; raises what nats-py raises."""
        client = self._broker.client
        if self._direct:
            self._subscription = await client.subscribe_direct(self._subject, self._direct)
            return
        self._subscription = await client.subscribe(
            self._subject,
            cb=self._handler,
            pending_msgs_limit=_NO_LIMIT,
            pending_bytes_limit=_PENDING_BYTES,
        )

    async def unsubscribe(self) -> None:
        """No more messages; idempotent."""
        if subscription := self._leave():
            try:
                await subscription.unsubscribe()
            except nats.errors.Error:
                return  # its client has closed, and has forgotten it

    async def drain(self) -> None:
        """No more messages, once the handler has had those that are on their way. Idempotent."""
        if subscription := self._leave():
            try:
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await subscription.drain()  # type: ignore[no-untyped-call]
            except (nats.errors.Error, TimeoutError):
                return  # there is nothing to wait for: its client has closed, or hears nothing

    def _leave(self) -> Subscription | None:
        self._broker.forget(self)
        subscription, self._subscription = self._subscription, None
        return subscription
