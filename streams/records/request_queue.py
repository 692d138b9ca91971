"""Lanes: queue a tenant's requests; the broker itself refuses a request once the lane is full.

The stream bounds every lane by the highest limit of any tenant. For a tenant with a lower limit the
broker counts the lane first, and the publish succeeds only if no request was queued there since
(compare-and-set on the lane's last sequence): exact over any number of gateways.
"""

from contextlib import suppress

from nats.errors import Error as NatsError

from streams import subjects, topology
from streams.broker.broker_client import STORE_SECONDS, Broker, PubAck, StoreRefused
from streams.errors import BrokerUnavailable, LaneFull, Overloaded
from streams.headers import EXPECTED_LAST, EXPECTED_LAST_ID, MESSAGE_ID
from streams.subjects import Lane

_RETRY_SECONDS = 2.0
# JetStream's error codes
_OTHER_LAST_ID = 10070
_ROLLUP_REFUSED = 10111


async def enqueue(
    broker: Broker, lane: Lane, payload: bytes, headers: dict[str, str], seconds: float
) -> PubAck:
    """Queue a request in a lane (one tenant's queue for one model and priority).

    Returns once the broker has stored the request. `headers` must have a message id, because the
    request is published again for up to `seconds` while the broker does not answer. Raises
    `LaneFull` if the lane is at the stream's own limit, `Overloaded` if the broker refuses for
    another reason (the stream's bytes are used up), and `BrokerUnavailable` if no answer comes in
    that time.
    """
    try:
        return await broker.store_retrying(subjects.request(lane), payload, headers, seconds)
    except StoreRefused as refusal:
        raise _refusal_of(lane, refusal) from refusal


async def enqueue_below(
    broker: Broker, lane: Lane, payload: bytes, headers: dict[str, str], seconds: float, limit: int
) -> PubAck:
    """Queue a request as `enqueue` does, but only if its lane holds fewer than `limit` requests.

    Raises `LaneFull` otherwise, and what `enqueue` raises. If another request enters the lane
    between counting and publishing, both are repeated: the limit is exact over any number of
    gateways.
    """
    while True:
        last = await _last_sequence(broker, lane)
        if await count_queued(broker, lane) >= limit:
            raise LaneFull(_full_message(lane, limit), _RETRY_SECONDS)
        conditional = headers | {EXPECTED_LAST: str(last)}
        subject = subjects.request(lane)
        try:
            return await broker.store_retrying(subject, payload, conditional, seconds)
        except StoreRefused as refusal:
            if not refusal.is_conflict:
                raise _refusal_of(lane, refusal) from refusal


async def has_been_queued(broker: Broker, lane: Lane, request_id: str) -> bool:
    """Return whether the broker has stored a request of this id in the last 15 minutes.

    It is asked to store one that it must refuse: it answers a known message id before it looks at
    the reasons. There are two, since servers of a cluster note an id as under way before they look
    at the message that must be the last; they refuse a roll-up, which the stream does not allow,
    before that. Nothing is stored. Raises `BrokerUnavailable`, or `StoreRefused`.
    """
    headers = {
        MESSAGE_ID: request_id,
        EXPECTED_LAST_ID: f"before-{request_id}",
        "Nats-Rollup": "sub",
    }
    try:
        ack = await broker.store_retrying(subjects.request(lane), b"", headers, STORE_SECONDS)
    except StoreRefused as refusal:
        if refusal.error_code not in (_OTHER_LAST_ID, _ROLLUP_REFUSED):
            raise
        return False
    return ack.duplicate


async def count_queued(broker: Broker, lane: Lane) -> int:
    """Return how many requests are queued in a lane and not yet dispatched; 0 if none.

    Raises `BrokerUnavailable` if the broker does not answer.
    """
    subject = subjects.request(lane)
    return (await _count_by_subject(broker, topology.REQUESTS, subject)).get(subject, 0)


async def count_submissions(broker: Broker, tenant: str) -> dict[Lane, int]:
    """Return how many submissions of a tenant's producers wait to be accepted, by lane.

    What names no lane is left out: it will be refused. Empty if the tenant has no stream. Raises
    `BrokerUnavailable`.
    """
    stream, pattern = topology.ingress_stream_name(tenant), subjects.submissions(tenant)
    state = await broker.read_tenant_stream(stream, pattern) or {}
    found = {}
    for subject, count in (state.get("subjects") or {}).items():
        with suppress(ValueError):
            found[subjects.parse_lane(subject)] = count
    return found


async def list_queued_models(broker: Broker) -> set[str]:
    """Return the names of the models for which any tenant has queued requests.

    Models that are not registered are included. Raises `BrokerUnavailable`.
    """
    counts = await _count_by_subject(broker, topology.REQUESTS, subjects.ALL_REQUESTS)
    return {subjects.parse_lane(subject).model for subject in counts}


async def list_models_of(broker: Broker, tenant: str) -> set[str]:
    """Return the names of the models that may have unfinished requests of `tenant`.

    These are the models for which the tenant has queued requests or for which any tenant has
    dispatched ones, since work is not stored by tenant. Raises `BrokerUnavailable`.
    """
    queued = await _count_by_subject(broker, topology.REQUESTS, subjects.requests_by(tenant))
    work = await _count_by_subject(broker, topology.WORK, subjects.ALL_WORK)
    return {subjects.parse_lane(subject).model for subject in queued} | {
        subjects.parse_work(subject).model for subject in work
    }


async def _count_by_subject(broker: Broker, stream: str, subject: str) -> dict[str, int]:
    """Return the number of messages on each subject that matches the filter `subject`."""
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
