"""Stores events in the stream WEBHOOKS, from which `millstream jobs` delivers them."""

from streams.broker.broker_client import Broker, StoreRefused
from streams.headers import EXPECTED_LAST
from streams.records.webhooks.events import WebhookEvent

STORE_SECONDS = 10.0


async def store_event(broker: Broker, event: WebhookEvent) -> None:
    """Store an event, unless it is stored already. Idempotent for as long as events are kept.

    Whoever ends an object calls it after the object's last status is stored, and again if it may
    have died in between: the same event is stored once, with the same id. Raises
    `BrokerUnavailable`, or `StoreRefused` if the broker takes none.
    """
    payload = event.encode(broker.clock.now())
    try:
        await broker.store_retrying(event.subject, payload, {EXPECTED_LAST: "0"}, STORE_SECONDS)
    except StoreRefused as refusal:
        if not refusal.is_conflict:
            raise
