"""Webhook endpoints in the broker: their records in the bucket `webhooks`."""

from collections.abc import Callable

from streams import job_subjects, subjects, topology
from streams.broker.broker_client import Broker
from streams.errors import StorageQuotaExceeded
from streams.records.cas.cas_records import CasRecords
from streams.records.webhooks.endpoint_records import WebhookEndpoint

MAX_ENDPOINTS = 20  # of a tenant


class EndpointStore:
    """The webhook endpoints of all tenants. Every method raises `BrokerUnavailable`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._records = CasRecords(broker, topology.WEBHOOK_ENDPOINTS, WebhookEndpoint.unpack)

    async def create(self, endpoint: WebhookEndpoint) -> WebhookEndpoint:
        """Store the record of a new endpoint.

        Raises `StorageQuotaExceeded` if the tenant has 20 already, or `StorageFull`.
        """
        stored = await self._records.write(_subject_of(endpoint), endpoint)
        others = [each for each in await self.list_of(endpoint.tenant) if each.id != endpoint.id]
        if len(others) >= MAX_ENDPOINTS:
            await self.change(stored, WebhookEndpoint.as_deleted)
            raise StorageQuotaExceeded(
                f"the tenant has {len(others)} webhook endpoints, the most there may be: delete one"
            )
        return stored

    async def find(self, tenant: str, endpoint_id: str) -> WebhookEndpoint | None:
        """Return a tenant's endpoint as it is now; None if there is none."""
        try:
            subject = job_subjects.webhook_endpoint(tenant, endpoint_id)
        except subjects.InvalidToken:
            return None
        found = await self._records.read_newest(subject)
        return None if found is None or found.is_deleted else found

    async def list_of(self, tenant: str) -> list[WebhookEndpoint]:
        """Return a tenant's endpoints, the oldest first."""
        found = await self._records.list_newest(job_subjects.webhook_endpoints_of(tenant))
        present = [each for each in found if not each.is_deleted]
        return sorted(present, key=lambda each: (each.created_at, each.id))

    async def change(
        self, endpoint: WebhookEndpoint, apply: Callable[[WebhookEndpoint], WebhookEndpoint]
    ) -> WebhookEndpoint | None:
        """Store `apply(endpoint)`; None if it was deleted.

        If another process was faster, `apply` is given what that has stored. Raises `StorageFull`.
        """

        def unless_deleted(known: WebhookEndpoint) -> WebhookEndpoint:
            return known if known.is_deleted else apply(known)

        changed = await self._records.change(_subject_of(endpoint), endpoint, unless_deleted)
        return None if changed is None or changed.is_deleted else changed

    async def remove_deleted(self) -> None:
        """Remove the records of endpoints that were deleted. Idempotent."""
        for endpoint in await self._records.list(job_subjects.ALL_WEBHOOK_ENDPOINTS):
            if endpoint.is_deleted:
                await self._broker.remove(topology.WEBHOOK_ENDPOINTS, endpoint.revision)


def _subject_of(endpoint: WebhookEndpoint) -> str:
    return job_subjects.webhook_endpoint(endpoint.tenant, endpoint.id)
