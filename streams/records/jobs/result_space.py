"""Room in the stream RESULTS: no batch is accepted whose results might find none."""

from dataclasses import dataclass

from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.errors import StorageFull
from streams.records.jobs.batch_records import Batch
from streams.records.jobs.batch_store import BatchStore


@dataclass(frozen=True)
class ResultSpace:
    """Bytes of RESULTS: its limit, what is stored, and what is promised to batches that run."""

    limit: int
    stored: int
    promised: int

    @property
    def free(self) -> int:
        """Bytes that may be promised to further batches."""
        return max(0, self.limit - self.stored - self.promised)

    def check(self, wanted: int) -> None:
        """Raise `StorageFull` if `wanted` bytes of results might not find room."""
        if wanted > self.free:
            raise StorageFull(
                f"the results of this batch may take {wanted} bytes, and of the {self.limit} bytes "
                f"for results {self.free} are neither used nor promised: set max_tokens in its "
                "lines, make it smaller, or try again when other batches have ended"
            )


async def read_result_space(broker: Broker, batches: BatchStore, besides: str = "") -> ResultSpace:
    """Return the room in RESULTS, without what the batch `besides` was promised.

    Raises `BrokerUnavailable`.
    """
    info = await declaration.stream_info(broker, topology.RESULTS)
    unfinished = await batches.list_unfinished()
    promised = sum(batch.promised_bytes for batch in unfinished if batch.id != besides)
    return ResultSpace(info.config.max_bytes or 0, info.state.bytes, promised)


async def create_with_space(broker: Broker, batches: BatchStore, batch: Batch) -> Batch:
    """Store the record of a new batch if there is room for its results.

    Two that are created at once may both be refused for want of room for both; they are never both
    accepted. One that is refused so has failed. Raises `StorageFull` or `BrokerUnavailable`.
    """
    (await read_result_space(broker, batches)).check(batch.reserved_bytes)
    stored = await batches.create(batch)
    try:
        (await read_result_space(broker, batches, batch.id)).check(batch.reserved_bytes)
    except StorageFull as error:
        code, message, now = error.code, error.message, int(broker.clock.now())
        await batches.change(stored, lambda it: it.as_refused(code, message, now))
        raise
    return stored
