"""Results of items in the stream RESULTS: each is stored once, whoever tries."""

from functools import partial

import structlog

from streams import job_subjects, topology
from streams.broker.broker_client import Broker, StoredMessage
from streams.headers import ItemRef
from streams.records.jobs.item_results import ItemResult
from streams.records.part_messages import join_parts, store_once

log = structlog.get_logger()


async def store_result(broker: Broker, tenant: str, item: ItemRef, result: ItemResult) -> bool:
    """Store how an item ended; return False if it has a result already. Idempotent.

    A failure that may pass, at a try that is not the last, is stored as that of the try alone.
    Raises `BrokerUnavailable`, or `StoreRefused` if RESULTS has no room.
    """
    subject = job_subjects.result(tenant, item.job, item.index)
    if result.never_ran or (result.may_pass and not item.is_last):
        subject = job_subjects.failed_try(tenant, item.job, item.index, item.attempt)
    parts = job_subjects.result(tenant, item.job, item.index)
    return await store_once(broker, subject, parts, result.pack())


async def read_result(broker: Broker, tenant: str, job: str, index: int) -> ItemResult | None:
    """Return the result of a line as some replica has it; None while that has none.

    Raises `BrokerUnavailable`.
    """
    found = await _read_last(broker, job_subjects.result(tenant, job, index))
    return await unpack_result(broker, found) if found else None


async def read_current_result(
    broker: Broker, tenant: str, job: str, index: int
) -> ItemResult | None:
    """Return the result of a line; None only if none was stored before this call.

    For gateways and jobs services. Raises `BrokerUnavailable`.
    """
    subject = job_subjects.result(tenant, job, index)
    found = await broker.read_current(topology.RESULTS, subject)
    return await unpack_result(broker, found) if found else None


async def has_failed_try(broker: Broker, tenant: str, job: str, index: int, attempt: int) -> bool:
    """Return whether a try of an item has failed without a result of the item's.

    Raises `BrokerUnavailable`.
    """
    query = {"last_by_subj": job_subjects.failed_try(tenant, job, index, attempt)}
    return bool(await broker.read(topology.RESULTS, query))


async def unpack_result(broker: Broker, message: StoredMessage) -> ItemResult:
    """Return the result that a message of RESULTS holds, with its other parts.

    One that cannot be read is a failure, as whoever writes results may write anything. Raises
    `BrokerUnavailable`, also for parts that this replica does not have yet.
    """
    try:
        parts = job_subjects.result(*job_subjects.parse_result(message.subject))
        return ItemResult.unpack(
            await join_parts(broker, message, parts, partial(_read_last, broker))
        )
    except (ValueError, TypeError, KeyError) as error:
        log.error("result_unreadable", subject=message.subject, reason=repr(error))
        return ItemResult("", 0, 0, code="internal_error", message="the result cannot be read")


async def _read_last(broker: Broker, subject: str) -> StoredMessage | None:
    found = await broker.read(topology.RESULTS, {"last_by_subj": subject})
    return found[0] if found else None
