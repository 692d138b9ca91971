"""Results of items in the stream RESULTS: each is stored once, whoever tries."""

import secrets

import structlog

from streams import subjects, topology
from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import EXPECTED_LAST, MAX_HEADER_BYTES, ItemRef
from streams.records.jobs.item_results import ItemResult

log = structlog.get_logger()

STORE_SECONDS = 30.0
MAX_PARTS = 1024
_PARTS = "Parts"  # how many messages hold a result; the one that counts is the last
_NONCE = "Nonce"  # names the parts before it


async def store_result(broker: Broker, tenant: str, item: ItemRef, result: ItemResult) -> None:
    """Store how an item ended, unless it has a result already. Idempotent.

    A failure that may pass, at a try that is not the last, is stored as that of the try alone.
    Raises `BrokerUnavailable`, or `StoreRefused` if RESULTS has no room.
    """
    subject = subjects.result(tenant, item.job, item.index)
    if result.never_ran or (result.may_pass and not item.is_last):
        subject = subjects.failed_try(tenant, item.job, item.index, item.attempt)
    payload, headers = result.pack(), {EXPECTED_LAST: "0"}
    limit = broker.max_payload - MAX_HEADER_BYTES
    pieces = [payload[at : at + limit] for at in range(0, len(payload), limit)]
    if len(pieces) > 1:
        nonce = secrets.token_hex(8)
        headers |= {_PARTS: str(len(pieces)), _NONCE: nonce}
        for number, piece in enumerate(pieces[:-1]):
            part = subjects.result_part(tenant, item.job, item.index, f"{nonce}-{number}")
            await broker.store_retrying(part, piece, {}, STORE_SECONDS)
    try:
        await broker.store_retrying(subject, pieces[-1], headers, STORE_SECONDS)
    except StoreRefused as refusal:
        if not refusal.is_conflict:
            raise


async def read_result(broker: Broker, tenant: str, job: str, index: int) -> ItemResult | None:
    """Return the result of a line; None while it has none. Raises `BrokerUnavailable`."""
    query = {"last_by_subj": subjects.result(tenant, job, index)}
    found = await broker.read(topology.RESULTS, query)
    return await unpack_result(broker, found[0]) if found else None


async def has_failed_try(broker: Broker, tenant: str, job: str, index: int, attempt: int) -> bool:
    """Return whether a try of an item has failed without a result of the item's.

    Raises `BrokerUnavailable`.
    """
    query = {"last_by_subj": subjects.failed_try(tenant, job, index, attempt)}
    return bool(await broker.read(topology.RESULTS, query))


async def unpack_result(broker: Broker, message: StoredMessage) -> ItemResult:
    """Return the result that a message of RESULTS holds, with its other parts.

    One that cannot be read is a failure, as whoever writes results may write anything. Raises
    `BrokerUnavailable`, also for parts that this replica does not have yet.
    """
    try:
        return ItemResult.unpack(await _join_parts(broker, message))
    except (ValueError, TypeError, KeyError) as error:
        log.error("result_unreadable", subject=message.subject, reason=repr(error))
        return ItemResult("", 0, 0, code="internal_error", message="the result cannot be read")


async def _join_parts(broker: Broker, message: StoredMessage) -> bytes:
    count = int(message.headers.get(_PARTS, "1"))
    if count == 1:
        return message.data
    if not 1 < count <= MAX_PARTS:
        raise ValueError(f"it has {count} parts")
    tenant, job, index = subjects.parse_result(message.subject)
    pieces = []
    for number in range(count - 1):
        part = f"{message.headers[_NONCE]}-{number}"
        query = {"last_by_subj": subjects.result_part(tenant, job, index, part)}
        found = await broker.read(topology.RESULTS, query)
        if not found:
            raise BrokerUnavailable(f"a part of the result on {message.subject} cannot be read yet")
        pieces.append(found[0].data)
    return b"".join((*pieces, message.data))
