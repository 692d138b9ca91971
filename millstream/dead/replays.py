"""Replays a dead letter: queues its request again as a new request, at most once per letter.

The request that died has ended for its client; the replay is another one, with an id, a deadline
and a ledger record of its own. Its id is first stored by compare-and-set, and it then enters its
lane with that id as message id: repeating a replay sends the same message, which the broker
recognises as a duplicate. Once the broker may have forgotten that id, the letter counts as
replayed.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from streams import messages, subjects, topology
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable, LaneFull, MillstreamError, Overloaded
from streams.headers import EXPECTED_LAST, MESSAGE_ID, Envelope, ItemRef
from streams.records import request_queue
from streams.records.dead_letters import REPLAY_OF, DeadLetter
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.subjects import Lane

_REPEATABLE_SECONDS = topology.LOG_SECONDS / 2  # well within the broker's duplicate window


class NotReplayable(MillstreamError):
    """The dead letter cannot be queued again: it is no request, or one of an item of a job."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be replayed: {reason}")


@dataclass(frozen=True)
class Replay:
    """The new request as which a dead letter was queued again.

    `request_id` is the new request's; `at` is when it was made, in epoch ms.
    """

    request_id: str
    at: int


async def read_replays(broker: Broker) -> dict[str, Replay]:
    """Return the replay of each dead letter that was queued again, by the letter's name.

    The name is the id of the request that failed. Raises `BrokerUnavailable` if the broker does not
    answer.
    """
    stored = await broker.read_subject(topology.REPLAYS, subjects.ALL_REPLAYS)
    return {m.subject.rpartition(".")[2]: _unpack(m.data) for m in stored}


async def replay(broker: Broker, letter: DeadLetter) -> tuple[Replay, bool]:
    """Queue a dead letter's request again, as a new request, unless that was done before.

    Returns the replay (the new request's id and time), and True if this call queued the request or
    False if an earlier one had. Raises `NotReplayable` for a letter whose headers are not those of
    a request, or that is of an item of a job, and `LaneFull` or `Overloaded` if the broker refused
    to queue the request. `BrokerUnavailable` leaves open whether the request was queued. Calling
    again soon after it is safe, because the broker recognises the same message and does not queue
    it twice.
    """
    if letter.envelope is None:
        raise NotReplayable(letter.name, "its headers are not those of a request")
    if item := letter.envelope.item:
        raise NotReplayable(letter.name, _explain_item(item))
    now = broker.clock.now_ms()
    record = Replay(secrets.token_hex(16), now)
    subject = subjects.replay(letter.name)
    seq = await _claim(broker, subject, record)
    if seq is None:
        record = await _read_claim(broker, subject)
    if now - record.at > _REPEATABLE_SECONDS * 1000:
        return record, False
    try:
        return record, await _enqueue(broker, letter, letter.envelope, record)
    except (LaneFull, Overloaded):
        if seq:
            await broker.remove(topology.REPLAYS, seq)
        raise


async def _claim(broker: Broker, subject: str, record: Replay) -> int | None:
    """Store the replay as the letter's; its sequence, or None if another one is stored already."""
    try:
        data = messages.pack(record)
        return (await broker.store(subject, data, {EXPECTED_LAST: "0"})).seq
    except StoreRefused as refusal:
        if not refusal.is_conflict:
            raise
        return None


async def _read_claim(broker: Broker, subject: str) -> Replay:
    found = await broker.read_subject(topology.REPLAYS, subject)
    if not found:  # another process removed its record because the lane refused the request
        raise BrokerUnavailable("somebody else has tried to replay it and failed: try again")
    return _unpack(found[0].data)


async def _enqueue(broker: Broker, letter: DeadLetter, envelope: Envelope, record: Replay) -> bool:
    """Publish the request to its lane; False if the broker had it already."""
    lane = Lane(letter.tenant, letter.model, letter.priority)
    headers: Mapping[str, str] = _as_new_request(envelope, record).to_headers()
    more = {MESSAGE_ID: record.request_id, REPLAY_OF: letter.name}
    stored = await request_queue.enqueue(
        broker, lane, letter.payload, {**headers, **more}, RETRY_TIMEOUT_SECONDS
    )
    return not stored.duplicate


def _as_new_request(envelope: Envelope, record: Replay) -> Envelope:
    """The envelope of a request accepted now, with equal time to its deadline and no reservation.

    No gateway has reserved quota for it, so its account is empty. A durable answer takes the place
    of that of the request which failed.
    """
    answer = envelope.answer and replace(envelope.answer, replaces=envelope.request_id)
    return replace(
        envelope,
        request_id=record.request_id,
        accepted=record.at,
        deadline=record.at + envelope.deadline - envelope.accepted,
        dispatched=0,
        account="",
        priority="",
        estimated_wait_ms=None,
        answer=answer,
    )


def _explain_item(item: ItemRef) -> str:
    """Return why a replay of a job's item is refused: the job itself tries it again."""
    return (
        f"it was try {item.attempt} of item {item.index} of {item.job}, which is tried again "
        "there; lines of a batch that have failed for good run by `millstream batch retry`, and a "
        "response by a new one"
    )


def _unpack(data: bytes) -> Replay:
    return messages.from_wire(Replay, messages.unpack(data))
