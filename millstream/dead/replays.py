"""Replaying a dead letter: its request once more, as a new one that nobody can double.

The request that died has ended for its client; so this is another, with an id, a deadline and a
ledger record of its own. Which one is written down first, by compare-and-set, and it enters its
lane under that id as message id: whoever repeats this repeats the same request, which the broker
recognises. Later than that is certain, the letter counts as replayed.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from streams import messages, subjects, topology
from streams.broker.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable, LaneFull, MillstreamError, Overloaded
from streams.headers import EXPECTED_LAST, MESSAGE_ID, Envelope
from streams.records import lanes
from streams.records.dead_letters import REPLAY_OF, DeadLetter
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.subjects import Lane

_REPEATABLE_SECONDS = topology.LOG_SECONDS / 2  # well within the time that the broker remembers


class NotReplayable(MillstreamError):
    """Work whose headers nobody can read is no request."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} cannot be replayed: its headers are not those of a request")


@dataclass(frozen=True)
class Replay:
    """What a dead letter has become; `at` is epoch ms."""

    request_id: str
    at: int


async def read_replays(broker: Broker) -> dict[str, Replay]:
    """All replays, by the dead letter's name."""
    stored = await broker.read_subject(topology.REPLAYS, subjects.ALL_REPLAYS)
    return {m.subject.rpartition(".")[2]: _unpack(m.data) for m in stored}


async def replay(broker: Broker, letter: DeadLetter) -> tuple[Replay, bool]:
    """What the letter has become, and whether it was by this call.

    Raises `NotReplayable`; `LaneFull` or `Overloaded` when it is not replayed; `BrokerUnavailable`
    when it may be: then repeat it soon.
    """
    if letter.envelope is None:
        raise NotReplayable(letter.name)
    now = broker.clock.now_ms()
    wanted = Replay(secrets.token_hex(16), now)
    subject = subjects.replay(letter.name)
    seq = await _claim(broker, subject, wanted)
    if seq is None:
        wanted = await _read_claim(broker, subject)
    if now - wanted.at > _REPEATABLE_SECONDS * 1000:
        return wanted, False
    try:
        return wanted, await _enqueue(broker, letter, letter.envelope, wanted)
    except (LaneFull, Overloaded):
        if seq:
            await broker.remove(topology.REPLAYS, seq)
        raise


async def _claim(broker: Broker, subject: str, wanted: Replay) -> int | None:
    """The sequence of the record; None if somebody was faster."""
    try:
        data = messages.pack(wanted)
        return (await broker.store(subject, data, {EXPECTED_LAST: "0"})).seq
    except StoreRefused as refusal:
        if not refusal.is_conflict:
            raise
        return None


async def _read_claim(broker: Broker, subject: str) -> Replay:
    found = await broker.read_subject(topology.REPLAYS, subject)
    if not found:  # it could not be queued, just now
        raise BrokerUnavailable("somebody else has tried to replay it and failed: try again")
    return _unpack(found[0].data)


async def _enqueue(broker: Broker, letter: DeadLetter, envelope: Envelope, wanted: Replay) -> bool:
    """False when it has been queued before."""
    lane = Lane(letter.tenant, letter.model, letter.priority)
    headers: Mapping[str, str] = _as_new_request(envelope, wanted).to_headers()
    more = {MESSAGE_ID: wanted.request_id, REPLAY_OF: letter.name}
    stored = await lanes.enqueue(
        broker, lane, letter.payload, {**headers, **more}, RETRY_TIMEOUT_SECONDS
    )
    return not stored.duplicate


def _as_new_request(envelope: Envelope, wanted: Replay) -> Envelope:
    """The same request, as if it came now; no gateway has reserved anything for it."""
    return replace(
        envelope,
        request_id=wanted.request_id,
        accepted=wanted.at,
        deadline=wanted.at + envelope.deadline - envelope.accepted,
        dispatched=0,
        account="",
        priority="",
        estimated_wait_ms=None,
    )


def _unpack(data: bytes) -> Replay:
    return messages.from_wire(Replay, messages.unpack(data))
