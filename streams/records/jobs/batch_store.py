"""Batches in the broker: their records in the bucket `batches`."""

from collections.abc import Callable

from streams import job_subjects, subjects, topology
from streams.broker.broker_client import Broker
from streams.records.cas.cas_records import CasRecords
from streams.records.jobs.batch_records import Batch


class BatchStore:
    """The records of all tenants' batches. Every method raises `BrokerUnavailable`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._records = CasRecords(broker, topology.BATCHES, Batch.unpack)

    async def create(self, batch: Batch) -> Batch:
        """Store the record of a new batch, and tell the jobs services; raises `StorageFull`."""
        stored = await self._records.write(_subject_of(batch), batch)
        await self._tell(stored)
        return stored

    async def find(self, tenant: str, batch_id: str) -> Batch | None:
        """Return a tenant's batch as it is now; None if there is none."""
        try:
            subject = job_subjects.batch_record(tenant, batch_id)
        except subjects.InvalidToken:
            return None
        return await self._records.read_newest(subject)

    async def list_of(self, tenant: str) -> list[Batch]:
        """Return a tenant's batches, the oldest first."""
        found = await self._records.list_newest(job_subjects.batch_records_of(tenant))
        return sorted(found, key=lambda batch: (batch.created_at, batch.id))

    async def list_unfinished(self) -> list[Batch]:
        """Return all tenants' batches that have not ended, or whose event is not stored yet."""
        found = await self._records.list(job_subjects.ALL_BATCH_RECORDS)
        return [batch for batch in found if not batch.is_over]

    async def change(self, batch: Batch, apply: Callable[[Batch], Batch]) -> Batch | None:
        """Store `apply(batch)`, and tell the jobs services; None if the record was removed.

        If another process was faster, `apply` is given what that has stored. Raises whatever
        `apply` raises, and `StorageFull`.
        """
        changed = await self._records.change(_subject_of(batch), batch, apply)
        if changed:
            await self._tell(changed)
        return changed

    async def save(self, batch: Batch, apply: Callable[[Batch], Batch]) -> Batch | None:
        """Do as `change`, for the service that runs the batch: nobody is told."""
        return await self._records.change(_subject_of(batch), batch, apply)

    async def _tell(self, batch: Batch) -> None:
        await self._broker.publish(job_subjects.batch_changed(batch.tenant, batch.id))


def _subject_of(batch: Batch) -> str:
    return job_subjects.batch_record(batch.tenant, batch.id)
