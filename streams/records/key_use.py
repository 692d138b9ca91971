"""Counters of the uses of API keys, and of the last one, in the stream USAGE."""

from datetime import datetime

from streams import quota_windows, subjects
from streams.broker.broker_client import Broker, StreamMissing
from streams.records.usage_counters import add_to_counter
from streams.topology import USAGE
from streams.usage_accounts import Meter, key_scope


async def add_uses(broker: Broker, tenant: str, key_id: str, uses: int) -> None:
    """Add to the day's count of a key's uses; its last addition tells when it was used last.

    Tries once. Raises `Overloaded` or `BrokerUnavailable`.
    """
    day = quota_windows.utc_day(broker.clock.now())
    subject = subjects.usage(tenant, key_scope(key_id), Meter.USES, day)
    await add_to_counter(broker, subject, uses)


async def read_last_uses(broker: Broker) -> dict[str, float]:
    """Return when each key was used last, in epoch seconds by key id, to a minute or so.

    Keys that were not used for a month, as long as counters are kept, are not in it; none is while
    the stream of counters is missing. Raises `BrokerUnavailable`.
    """
    found: dict[str, float] = {}
    try:
        counters = await broker.read_subject(USAGE, subjects.usage_of(Meter.USES))
    except StreamMissing:
        return found
    for message in counters:
        scope = message.subject.split(".")[3]
        key_id = scope.removeprefix(key_scope(""))
        stored_at = datetime.fromisoformat(message.headers["Nats-Time-Stamp"]).timestamp()
        found[key_id] = max(found.get(key_id, 0.0), stored_at)
    return found
