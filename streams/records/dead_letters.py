"""Dead letters: work that nobody could finish, stored for the operator.

A dead letter is the work message as it was, under `infer.dead.<tenant>.<model>`, with headers that
say how it ended.
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

UNKNOWN = "unknown"  # the tenant of work whose headers cannot be read
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
    broker: Broker,
    work: WorkMessage,
    envelope: Envelope | None,
    reason: str,
    history: AttemptHistory,
) -> None:
    """Store work as a dead letter, once: the request id deduplicates.

    `envelope` is None for work whose headers cannot be read. The broker's own headers are left out,
    and the payload, too, if with the added headers it would exceed the broker's limit. Raises
    `StoreRefused` or `BrokerUnavailable`.
    """
    pool = subjects.parse_work(work.subject)
    own_headers = {k: v for k, v in work.headers.items() if not k.startswith("Nats-")}
    headers = {PRIORITY: pool.priority.value} | own_headers
    headers |= {
        MESSAGE_ID: envelope.request_id if envelope else f"{UNKNOWN}-{work.seq}",
        _REASON: reason,
        _ENDED: str(broker.clock.now_ms()),
        _TRIES: json.dumps(history.pack()),
    }
    subject = subjects.dead(envelope.tenant if envelope else UNKNOWN, pool.model)
    # A larger message would make the server close the connection.
    fits = len(work.data) + MAX_HEADER_BYTES <= broker.max_payload
    await broker.store_retrying(subject, work.data if fits else b"", headers, RETRY_TIMEOUT_SECONDS)


async def dead_letter_malformed(broker: Broker, delivery: Delivery) -> None:
    """Remove work that `parse_work_envelope` cannot read; its client cannot be told of the end.

    It is stored as a dead letter if at least its subject is one of ours. Raises as
    `store_dead_letter`.
    """
    log.error("work_unreadable", subject=delivery.subject, seq=delivery.seq)
    if subjects.is_work(delivery.subject):
        await store_dead_letter(broker, delivery, None, MALFORMED, AttemptHistory())
    await delivery.terminate()


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter as read back from the stream DEAD.

    `envelope` is None if its headers cannot be read; `ended` is epoch milliseconds.
    """

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
        """The request's id, or `unknown-<sequence>` if that cannot be read."""
        return self.envelope.request_id if self.envelope else f"{UNKNOWN}-{self.seq}"

    @property
    def priority(self) -> Priority:
        """The priority that its client asked for."""
        return Priority(self.headers.get(PRIORITY, Priority.STANDARD))

    @property
    def replay_of(self) -> str:
        """The name of the dead letter that its request replayed; empty if a client sent it."""
        return self.headers.get(REPLAY_OF, "")

    @classmethod
    def from_message(cls, message: StoredMessage) -> Self:
        """Parse a message of the stream DEAD."""
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
    """Read the dead letters of one tenant and model (None: of all), oldest first.

    Raises `BrokerUnavailable`.
    """
    subject = subjects.dead_of(tenant, model)
    return [DeadLetter.from_message(m) for m in await broker.read_subject(topology.DEAD, subject)]


def parse_envelope(headers: Mapping[str, str]) -> Envelope | None:
    """Parse the headers of a request or its work; None if they are not ours."""
    try:
        return Envelope.from_headers(headers)
    except (KeyError, ValueError):
        return None


def parse_work_envelope(work: WorkMessage) -> Envelope | None:
    """Parse the headers of a message of WORK; None if they, or its subject, are not ours."""
    return parse_envelope(work.headers) if subjects.is_work(work.subject) else None
