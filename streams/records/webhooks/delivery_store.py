"""Deliveries in the broker: their records in the bucket `deliveries`."""

from collections.abc import Callable

import structlog

from streams import job_subjects, subjects, topology
from streams.broker.broker_client import Broker
from streams.records.cas.cas_records import CasRecords, RecordChanged
from streams.records.webhooks.delivery_records import DeliveryKey, WebhookDelivery

log = structlog.get_logger()


class DeliveryStore:
    """The deliveries of all tenants. Every method raises `BrokerUnavailable`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._records = CasRecords(broker, topology.DELIVERIES, WebhookDelivery.unpack)

    async def create(self, delivery: WebhookDelivery) -> WebhookDelivery | None:
        """Store the record of a delivery; None if there is one already. Raises `StorageFull`."""
        try:
            return await self._records.write(job_subjects.delivery(*delivery.key), delivery)
        except RecordChanged:
            return None

    async def find(self, key: DeliveryKey) -> WebhookDelivery | None:
        """Return a delivery as it is now; None if there is none."""
        try:
            subject = job_subjects.delivery(*key)
        except subjects.InvalidToken:
            return None
        return await self._records.read_newest(subject)

    async def list_of(self, tenant: str, endpoint_id: str) -> list[WebhookDelivery]:
        """Return the deliveries to a tenant's endpoint, the newest first."""
        found = await self._records.list_newest(job_subjects.deliveries_to(tenant, endpoint_id))
        return sorted(found, key=lambda each: (each.created_at, each.event), reverse=True)

    async def list_changed(self, after: int) -> tuple[list[WebhookDelivery], int]:
        """Return records stored behind a sequence, in order, and the sequence that was read to.

        That is `after` if there are none. What is no record is left out, and logged.
        """
        pattern = job_subjects.ALL_DELIVERIES
        page = await self._broker.read_filtered(topology.DELIVERIES, pattern, after)
        found: list[WebhookDelivery] = []
        for message in page.messages:
            try:
                found.append(WebhookDelivery.unpack(message.data, message.seq))
            except (ValueError, TypeError, KeyError) as error:
                log.error("delivery_unreadable", subject=message.subject, reason=repr(error))
        return found, page.messages[-1].seq if page.messages else after

    async def change(
        self, delivery: WebhookDelivery, apply: Callable[[WebhookDelivery], WebhookDelivery]
    ) -> WebhookDelivery | None:
        """Store `apply(delivery)`; None if the record was removed.

        If another process was faster, `apply` is given what that has stored. Raises `StorageFull`.
        """
        return await self._records.change(job_subjects.delivery(*delivery.key), delivery, apply)

    async def remove(self, revision: int) -> None:
        """Remove a record, unless it has been changed since."""
        await self._broker.remove(topology.DELIVERIES, revision)
