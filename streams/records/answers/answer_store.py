"""Durable answers in the streams of their tenants: each is stored once, whoever tries."""

from functools import partial

from streams import job_subjects, messages, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage
from streams.errors import AnswerLost
from streams.messages import Encoding, Record
from streams.records.part_messages import join_parts, store_once


async def store_answer(
    broker: Broker,
    tenant: str,
    key: str,
    answer: Record,
    encoding: Encoding,
    replaces: str = "",
) -> bool:
    """Store the answer to the request with a producer's escaped id; False if there is one already.

    The answer to the request `replaces` does not count: this one takes its place. Raises
    `BrokerUnavailable`, which is a `StreamMissing` if the tenant has no stream, or `StoreRefused`.
    """
    subject, packed = job_subjects.answer(tenant, key), messages.pack_record(answer, encoding)
    replaced = await _find_sequence(broker, tenant, key, replaces) if replaces else 0
    return await store_once(broker, subject, subject, packed, replaced)


async def read_answer(broker: Broker, tenant: str, key: str) -> Record | None:
    """Return the answer that is stored under a producer's escaped id; None if there is none.

    Raises `AnswerLost` or `BrokerUnavailable`.
    """
    found = await _read_last(broker, tenant, key)
    return await _unpack(broker, tenant, key, found) if found else None


async def _find_sequence(broker: Broker, tenant: str, key: str, request_id: str) -> int:
    """Return the sequence of the answer to a request; 0 if another one, or none, can be read."""
    stored = await _read_last(broker, tenant, key)
    if stored is None:
        return 0
    try:
        answer = await _unpack(broker, tenant, key, stored)
    except AnswerLost:
        return 0
    return stored.seq if answer.get("request_id") == request_id else 0


async def _read_last(broker: Broker, tenant: str, key: str) -> StoredMessage | None:
    stream = topology.answers_stream_name(tenant)
    return await broker.read_last(stream, job_subjects.answer(tenant, key))


async def _unpack(broker: Broker, tenant: str, key: str, last: StoredMessage) -> Record:
    stream = topology.answers_stream_name(tenant)
    try:
        read = partial(broker.read_last, stream)
        return messages.unpack_record(await join_parts(broker, last, last.subject, read))
    except (ValueError, KeyError) as error:
        raise AnswerLost(
            f"the answer of {subjects.unescape(key)!r} in {stream} cannot be read: {error}; purge "
            "it, then submit again"
        ) from error
