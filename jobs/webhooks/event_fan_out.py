"""Makes a delivery for each event and each endpoint that is to be told of it.

The events are those of the streams WEBHOOKS and THRESHOLDS. Where one was read and its deliveries
made, and the process died before the cursor was stored, they are made again by the next one: a
record of that event and endpoint exists then.
"""

import asyncio
from typing import Any

import orjson
import structlog

from jobs.metrics import WEBHOOK_EVENTS
from jobs.webhooks.delivery_queue import DeliveryQueue
from streams import job_subjects, subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoredMessage
from streams.records.webhooks import event_cursor
from streams.records.webhooks.delivery_records import WebhookDelivery
from streams.records.webhooks.delivery_store import DeliveryStore
from streams.records.webhooks.endpoint_records import WebhookEndpoint
from streams.records.webhooks.endpoint_store import EndpointStore

log = structlog.get_logger()

PAGE = 100  # events between two writes of the cursor
SOURCES = {
    topology.WEBHOOKS: job_subjects.ALL_EVENTS,
    topology.THRESHOLDS: subjects.thresholds_of(None),
}


class EventFanOut:
    """The events of both streams, from the cursor on; used by one process at a time."""

    def __init__(
        self,
        broker: Broker,
        endpoints: EndpointStore,
        deliveries: DeliveryStore,
        queue: DeliveryQueue,
    ) -> None:
        self._broker = broker
        self._endpoints, self._deliveries, self._queue = endpoints, deliveries, queue
        self._cursor: dict[str, int] = {}

    async def open(self) -> None:
        """Read the cursor; raises `BrokerUnavailable`.

        In a stream that was made anew sequences begin anew, and so does the cursor.
        """
        stored = await event_cursor.read_cursor(self._broker)
        for stream in SOURCES:
            info = await declaration.stream_info(self._broker, stream)
            at = stored.get(stream, 0)
            self._cursor[stream] = at if at <= info.state.last_seq else 0

    async def run_once(self) -> None:
        """Make the deliveries of all events since the last call.

        Raises `BrokerUnavailable`, `StorageFull`, or `StoreRefused`; the events in question come
        again then.
        """
        for stream, pattern in SOURCES.items():
            while await self._make_page(stream, pattern):
                pass

    async def _make_page(self, stream: str, pattern: str) -> bool:
        """Return whether there is another page."""
        page = await self._broker.read_filtered(stream, pattern, self._cursor[stream], PAGE)
        if not page.messages:
            return False
        tenants = {job_subjects.parse_event_tenant(message.subject) for message in page.messages}
        told = {tenant: await self._list_endpoints(tenant) for tenant in tenants}
        await asyncio.gather(
            *(
                self._fan_out(each, told[job_subjects.parse_event_tenant(each.subject)])
                for each in page.messages
            )
        )
        self._cursor[stream] = page.messages[-1].seq
        await event_cursor.store_cursor(self._broker, self._cursor)
        return bool(page.remaining)

    async def _list_endpoints(self, tenant: str) -> list[WebhookEndpoint]:
        """A tenant's endpoints; none of a name that no tenant can have."""
        try:
            return await self._endpoints.list_of(tenant)
        except subjects.InvalidToken:
            return []

    async def _fan_out(self, message: StoredMessage, endpoints: list[WebhookEndpoint]) -> None:
        try:
            event: dict[str, Any] = orjson.loads(message.data)
            id, kind, at = subjects.token(event["id"]), str(event["type"]), int(event["created_at"])
        except (ValueError, TypeError, KeyError) as error:
            log.error("event_unreadable", subject=message.subject, reason=repr(error))
            return
        for endpoint in endpoints:
            if endpoint.is_told(kind, at):
                await self._deliver(endpoint, id, kind, at, message.data)

    async def _deliver(
        self, endpoint: WebhookEndpoint, event: str, kind: str, at: int, body: bytes
    ) -> None:
        if self._queue.is_full(endpoint.tenant, endpoint.id):
            WEBHOOK_EVENTS.labels("dropped").inc()
            log.error(
                "webhook_dropped", tenant=endpoint.tenant, endpoint=endpoint.id, event_id=event
            )
            return
        now = self._broker.clock.now()
        delivery = WebhookDelivery(endpoint.tenant, endpoint.id, event, kind, body, at, now)
        if made := await self._deliveries.create(delivery):
            WEBHOOK_EVENTS.labels("queued").inc()
            self._queue.note(made)
