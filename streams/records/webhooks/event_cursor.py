"""Cursor of the fan-out: up to which sequence of each stream events have their deliveries."""

from collections.abc import Mapping

import orjson
import structlog

from streams import job_subjects, topology
from streams.broker.broker_client import Broker

log = structlog.get_logger()


async def read_cursor(broker: Broker) -> dict[str, int]:
    """Return the sequence by the stream's name; raises `BrokerUnavailable`.

    It is empty if what is stored cannot be read: all events are then looked at again.
    """
    query = {"last_by_subj": job_subjects.EVENT_CURSOR}
    found = await broker.read_from_leader(topology.WEBHOOK_ENDPOINTS, query)
    try:
        stored = orjson.loads(found.data) if found else {}
        return {str(stream): int(at) for stream, at in stored.items()}
    except (ValueError, TypeError, AttributeError) as error:
        log.error("event_cursor_unreadable", reason=str(error))
        return {}


async def store_cursor(broker: Broker, cursor: Mapping[str, int]) -> None:
    """Store the sequences. An older one is harmless: the deliveries exist, and are made once.

    Raises `BrokerUnavailable` or `StoreRefused`.
    """
    await broker.store(job_subjects.EVENT_CURSOR, orjson.dumps(cursor), repeats=True)
