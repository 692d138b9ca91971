"""Stored responses in the broker: their records in the bucket `responses`, and who needs work."""

from collections.abc import Callable

from streams import job_subjects, subjects, topology
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import StorageFull
from streams.records.cas.cas_records import STORE_SECONDS, CasRecords
from streams.records.jobs.item_results import ItemResult
from streams.records.jobs.result_store import read_current_result
from streams.records.responses.response_records import ITEM, StoredResponse


class ResponseStore:
    """The records of all tenants' responses. Every method raises `BrokerUnavailable`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._records = CasRecords(broker, topology.RESPONSES, StoredResponse.unpack)

    async def create(self, response: StoredResponse) -> StoredResponse:
        """Store the record of a new response; raises `StorageFull`, or `RecordChanged`."""
        return await self._records.write(_subject_of(response), response)

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response as it is now; None if there is none, or it is gone."""
        found = await self.find_any(tenant, response_id)
        return None if found is None or found.is_gone(self._broker.clock.now()) else found

    async def find_any(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response as `find`, also one that is deleted but not removed."""
        try:
            subject = job_subjects.response_record(tenant, response_id)
        except subjects.InvalidToken:
            return None
        return await self._records.read_newest(subject)

    async def find_result(self, response: StoredResponse) -> ItemResult | None:
        """Return how a response ended; None while it has no result."""
        return await read_current_result(self._broker, response.tenant, response.id, ITEM)

    async def change(
        self, response: StoredResponse, apply: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse | None:
        """Store `apply(response)`; None if the record was removed.

        If another process was faster, `apply` is given what that has stored. Raises whatever
        `apply` raises, and `StorageFull`.
        """
        return await self._records.change(_subject_of(response), response, apply)

    # Responses that need work: background ones that have not ended, and deleted ones

    async def mark_pending(self, response: StoredResponse) -> None:
        """Note that a response needs work, and tell the jobs services; raises `StorageFull`."""
        subject = job_subjects.pending_response(response.tenant, response.id)
        try:
            await self._broker.store_retrying(subject, b"", {}, STORE_SECONDS)
        except StoreRefused as refusal:
            if refusal.is_full:
                raise StorageFull(f"the stream {topology.RESPONSES} is full") from None
            raise
        await self.tell(response)

    async def tell(self, response: StoredResponse) -> None:
        """Tell the jobs services to look at a response that is pending."""
        await self._broker.publish(job_subjects.response_changed(response.tenant, response.id))

    async def list_pending(self) -> list[tuple[str, str]]:
        """Return tenant and id of all responses that need work, the oldest note first."""
        found = await self._broker.read_subject(
            topology.RESPONSES, job_subjects.ALL_PENDING_RESPONSES
        )
        return [job_subjects.parse_pending_response(message.subject) for message in found]

    async def find_pending(self, tenant: str, response_id: str) -> int:
        """Return the sequence of the note that a response needs work; 0 if there is none."""
        query = {"last_by_subj": job_subjects.pending_response(tenant, response_id)}
        found = await self._broker.read_from_leader(topology.RESPONSES, query)
        return found.seq if found else 0

    async def unmark_pending(self, tenant: str, response_id: str, note: int) -> None:
        """Remove the note with a sequence: what it asked for is done. A newer one stays.

        For jobs services, which may remove records.
        """
        subject = job_subjects.pending_response(tenant, response_id)
        await self._broker.purge(topology.RESPONSES, subject, note + 1)

    async def remove(self, response: StoredResponse) -> None:
        """Remove a response's result and its record. For jobs services. Idempotent."""
        results = job_subjects.results_of(response.tenant, response.id)
        await self._broker.purge(topology.RESULTS, results, 0)
        await self._broker.purge(topology.RESPONSES, _subject_of(response), 0)


def _subject_of(response: StoredResponse) -> str:
    return job_subjects.response_record(response.tenant, response.id)
