"""Dead letters: work that nobody could finish, kept for the operator.

A letter is the work as it was, under `infer.dead.<tenant>.<model>`, with headers about its end.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import structlog

from streams import subjects, topology
from streams.broker.connection import Broker, StoredMessage
from streams.broker.pull_loop import Delivery
from streams.headers import MAX_HEADER_BYTES, MESSAGE_ID, PRIORITY, Envelope
from streams.records import attempt_history
from streams.records.attempt_history import AttemptHistory
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.subjects import Priority

log = structlog.get_logger()

UNKNOWN = "unknown"  # the tenant of work whose headers say nothing
EXHAUSTED, MALFORMED = "attempts_exhausted", "malformed"
REPLAY_OF = "Replay-Of"  # on a replayed request and its work: the dead letter that it came from
_REASON, _ENDED, _TRIES = "Reason", "Ended", "Tries"


class WorkMessage(Protocol):
    """A message of WORK, as delivered or as stored."""

    @property
    def subject(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def seq(self) -> int: ...


async def store_dead_letter(
    broker: Broker, work: WorkMessage, envelope: Envelope | None, reason: str, tried: AttemptHistory
) -> None:
    """Store a dead letter, once; the broker's own headers are left behind."""
    pool = subjects.parse_work(work.subject)
    kept = {k: v for k, v in work.headers.items() if not k.startswith("Nats-")}
    headers = {PRIORITY: pool.priority.value} | kept
    headers |= {
        MESSAGE_ID: envelope.request_id if envelope else f"{UNKNOWN}-{work.seq}",
        _REASON: reason,
        _ENDED: str(broker.clock.now_ms()),
        _TRIES: json.dumps(tried.pack()),
    }
    subject = subjects.dead(envelope.tenant if envelope else UNKNOWN, pool.model)
    fits = (
        len(work.data) + MAX_HEADER_BYTES <= broker.max_payload
    )  # else the connection would close
    await broker.store_retrying(subject, work.data if fits else b"", headers, RETRY_TIMEOUT_SECONDS)


async def dead_letter_malformed(broker: Broker, delivery: Delivery) -> None:
    """Remove work that `envelope_of_work` cannot read, so that nobody can be told of its end.

    It is kept, where its subject at least is ours. Raises as `keep` does.
    """
    log.error("work_unreadable", subject=delivery.subject, seq=delivery.seq)
    if subjects.is_work(delivery.subject):
        await store_dead_letter(broker, delivery, None, MALFORMED, AttemptHistory())
    await delivery.terminate()


@dataclass(frozen=True)
class DeadLetter:
    """One dead letter; `envelope` is None where the headers are not ours, `ended` is epoch ms."""

    seq: int
    tenant: str
    model: str
    reason: str
    ended: int
    history: AttemptHistory
    envelope: Envelope | None
    payload: bytes
    headers: Mapping[str, str]

    @property
    def name(self) -> str:
        """The request's id, or what stands for it."""
        return self.envelope.request_id if self.envelope else f"{UNKNOWN}-{self.seq}"

    @property
    def priority(self) -> Priority:
        """What its client asked for."""
        return Priority(self.headers.get(PRIORITY, Priority.STANDARD))

    @property
    def replay_of(self) -> str:
        """The dead letter that its request came from; empty if it was a client's own."""
        return self.headers.get(REPLAY_OF, "")

    @classmethod
    def from_message(cls, message: StoredMessage) -> Self:
        tenant, model = subjects.parse_dead(message.subject)
        headers = message.headers
        return cls(
            seq=message.seq,
            tenant=tenant,
            model=model,
            reason=headers.get(_REASON, ""),
            ended=int(headers.get(_ENDED, "0")),
            history=attempt_history.unpack(json.loads(headers.get(_TRIES, "[]"))),
            envelope=parse_envelope(headers),
            payload=message.data,
            headers=headers,
        )


async def read_dead_letters(
    broker: Broker, tenant: str | None = None, model: str | None = None
) -> list[DeadLetter]:
    """The dead letters of one tenant and model, or of all, oldest first."""
    subject = subjects.dead_of(tenant, model)
    return [DeadLetter.from_message(m) for m in await broker.read_subject(topology.DEAD, subject)]


def parse_envelope(headers: Mapping[str, str]) -> Envelope | None:
    """What the headers of work say; None when they are not ours."""
    try:
        return Envelope.from_headers(headers)
    except (KeyError, ValueError):
        return None


def parse_work_envelope(work: WorkMessage) -> Envelope | None:
    """The same of a message of WORK, whose subject may not be ours either."""
    return parse_envelope(work.headers) if subjects.is_work(work.subject) else None
