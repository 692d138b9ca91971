"""Durable answers in the streams of their tenants: each is stored once, whoever tries."""

from functools import partial

from streams import job_subjects, messages, topology
from streams.broker.broker_client import Broker
from streams.messages import Encoding, Record
from streams.records.part_messages import join_parts, store_once


async def store_answer(
    broker: Broker, tenant: str, key: str, answer: Record, encoding: Encoding
) -> bool:
    """Store the answer to the request with a producer's escaped id; False if there is one already.

    Raises `BrokerUnavailable`, which is a `StreamMissing` if the tenant has no stream, or
    `StoreRefused`.
    """
    subject = job_subjects.answer(tenant, key)
    return await store_once(broker, subject, subject, messages.pack_record(answer, encoding))


async def read_answer(broker: Broker, tenant: str, key: str) -> Record | None:
    """Return the answer that is stored under a producer's escaped id; None if there is none.

    Raises `BrokerUnavailable`.
    """
    subject, stream = job_subjects.answer(tenant, key), topology.answers_stream_name(tenant)
    found = await broker.read_last(stream, subject)
    if found is None:
        return None
    data = await join_parts(found, subject, partial(broker.read_last, stream))
    return messages.unpack_record(data)
