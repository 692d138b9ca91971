"""Entering a lane: the broker itself refuses a tenant's request once its lane is full.

The stream bounds every lane by the highest limit of any tenant. For a tenant with a lower limit the
lane is counted by the broker first, and the publish made conditional on nobody having entered it
since (compare-and-set on the lane's last sequence): exact over any number of gateways.
"""

from nats.errors import Error as NatsError

from streams import subjects, topology
from streams.broker.connection import Broker, PubAck, StoreRefused
from streams.errors import BrokerUnavailable, LaneFull, Overloaded
from streams.headers import EXPECTED_LAST
from streams.subjects import Lane

_RETRY_SECONDS = 2.0


async def enqueue(
    broker: Broker, lane: Lane, payload: bytes, headers: dict[str, str], seconds: float
) -> PubAck:
    """Queue a request in a lane that the stream's own limit bounds.

    `headers` carry a message id, so that it is retried for `seconds` while the broker is silent.
    Raises `LaneFull`, `Overloaded` (the stream's bytes are used up), `BrokerUnavailable`.
    """
    try:
        return await broker.store_retrying(subjects.request(lane), payload, headers, seconds)
    except StoreRefused as refusal:
        raise _refusal_of(lane, refusal) from refusal


async def enqueue_below(
    broker: Broker, lane: Lane, payload: bytes, headers: dict[str, str], seconds: float, limit: int
) -> PubAck:
    """`enter` for a tenant whose `limit` is lower than the stream's."""
    while True:
        last = await _last_sequence(broker, lane)
        if await count_queued(broker, lane) >= limit:
            raise LaneFull(_full_message(lane, limit), _RETRY_SECONDS)
        expecting = headers | {EXPECTED_LAST: str(last)}
        try:
            return await broker.store_retrying(subjects.request(lane), payload, expecting, seconds)
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise _refusal_of(lane, refusal) from refusal


async def count_queued(broker: Broker, lane: Lane) -> int:
    """How many requests the broker holds in a lane."""
    subject = subjects.request(lane)
    return (await _count_by_subject(broker, topology.REQUESTS, subject)).get(subject, 0)


async def list_queued_models(broker: Broker) -> set[str]:
    """The models for which requests are queued, registered or not."""
    counts = await _count_by_subject(broker, topology.REQUESTS, subjects.ALL_REQUESTS)
    return {subjects.parse_lane(subject).model for subject in counts}


async def list_models_of(broker: Broker, tenant: str) -> set[str]:
    """The models for which a tenant has requests queued, or anybody has work."""
    queued = await _count_by_subject(broker, topology.REQUESTS, subjects.requests_by(tenant))
    work = await _count_by_subject(broker, topology.WORK, subjects.ALL_WORK)
    return {subjects.parse_lane(subject).model for subject in queued} | {
        subjects.parse_work(subject).model for subject in work
    }


async def _count_by_subject(broker: Broker, stream: str, subject: str) -> dict[str, int]:
    """How many messages the broker holds on each subject that the filter `subject` matches."""
    try:
        info = await broker.js.stream_info(stream, subjects_filter=subject)
    except (NatsError, TimeoutError) as error:
        raise BrokerUnavailable(f"cannot count {subject}: {error!r}") from error
    return info.state.subjects or {}


async def _last_sequence(broker: Broker, lane: Lane) -> int:
    query = {"last_by_subj": subjects.request(lane)}
    found = await broker.read(topology.REQUESTS, query)
    return found[0].seq if found else 0


def _refusal_of(lane: Lane, refusal: StoreRefused) -> LaneFull | Overloaded:
    if "per subject" in refusal.description:
        return LaneFull(_full_message(lane, None), _RETRY_SECONDS)
    return Overloaded(f"the broker refuses the request: {refusal}", _RETRY_SECONDS)


def _full_message(lane: Lane, limit: int | None) -> str:
    most = "" if limit is None else f" (limit {limit})"
    return f"the queue of {lane.priority} requests for {lane.model} is full{most}"
