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
from streams.broker.broker_client import Broker, StoredMessage
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
    """A dispatched request as a message of the stream WORK, either delivered or read back.

    `seq` is its sequence in the stream.
    """

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
    """Store work that nobody could finish as a dead letter, for an operator to look at.

    Returns once the broker has it. A repetition is dropped by the broker, since the request id is
    the message id. `reason` is a code such as `attempts_exhausted`; `envelope` is None for work
    whose headers cannot be read. The payload is left out if, with the added headers, it would
    exceed the broker's size limit. Retries for 30 s while the broker does not answer, then raises
    `BrokerUnavailable`. Raises `StoreRefused` if the broker refuses.
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
    """Remove a work message that `parse_work_envelope` cannot read.

    The broker does not deliver the message again. If at least the message's subject is one of
    Millstream's, the message is stored as a dead letter first. No client is told, since the client
    cannot be known. Raises what `store_dead_letter` raises; the message is not removed then.
    """
    log.error("work_unreadable", subject=delivery.subject, seq=delivery.seq)
    if subjects.is_work(delivery.subject):
        await store_dead_letter(broker, delivery, None, MALFORMED, AttemptHistory())
    await delivery.terminate()


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter as read back from the stream DEAD: work that nobody could finish, and why.

    `envelope` is the request's routing data, None if its headers cannot be read. `ended` is when
    the work was given up, in epoch milliseconds. `payload` is empty if it was too large to be
    stored.
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
        """The request's id; `unknown-<sequence in DEAD>` if the headers cannot be read."""
        return self.envelope.request_id if self.envelope else f"{UNKNOWN}-{self.seq}"

    @property
    def priority(self) -> Priority:
        """The priority that the request's client asked for; `standard` if no header says it."""
        return Priority(self.headers.get(PRIORITY, Priority.STANDARD))

    @property
    def replay_of(self) -> str:
        """Name of the dead letter that this request was a replay of; empty if it was none."""
        return self.headers.get(REPLAY_OF, "")

    @classmethod
    def from_message(cls, message: StoredMessage) -> Self:
        """Return the dead letter that a message of the stream DEAD holds.

        Missing headers give an empty reason, time 0 and an empty history; other headers that cannot
        be read give `envelope` None. Raises ValueError if the subject, the time or the history is
        malformed.
        """
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
    """Return the stored dead letters of one tenant and one model, oldest first.

    None as `tenant` or `model` stands for all. The list is empty if there are none. Raises
    `BrokerUnavailable` if the broker does not answer.
    """
    subject = subjects.dead_of(tenant, model)
    return [DeadLetter.from_message(m) for m in await broker.read_subject(topology.DEAD, subject)]


def parse_envelope(headers: Mapping[str, str]) -> Envelope | None:
    """Return the routing data in the headers of a request or of its work.

    None if a header is missing or malformed, as in a message that Millstream did not write.
    """
    try:
        return Envelope.from_headers(headers)
    except (KeyError, ValueError):
        return None


def parse_work_envelope(work: WorkMessage) -> Envelope | None:
    """Return the routing data in the headers of a message of the stream WORK.

    None if a header or the subject is malformed, as in a message that Millstream did not write.
    """
    return parse_envelope(work.headers) if subjects.is_work(work.subject) else None
