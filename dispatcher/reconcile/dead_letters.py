"""Ends work that no worker could finish: for the client a terminal, for the operator a dead letter.

The broker announces a message that has used up its deliveries, once and without guarantee;
`InFlightReconciler` finds what that missed, and what has outlived its deadline.
"""

from collections.abc import Mapping

import orjson
import structlog

from dispatcher.dispatching.terminals import write_terminal
from streams import subjects, topology
from streams.broker.broker_client import Broker, StoredMessage
from streams.headers import Envelope
from streams.records import attempt_history
from streams.records.attempt_history import AttemptHistory
from streams.records.dead_letters import EXHAUSTED, MALFORMED, parse_envelope, store_dead_letter
from streams.records.token_log import TokenLog
from streams.subjects import LogAddress

log = structlog.get_logger()

_ADVISORY = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{topology.WORK}."
MAX_DELIVERIES_ADVISORIES = f"{_ADVISORY}*"
GRACE_SECONDS = 3.0  # workers enforce deadlines themselves; this is for silent ones
DEADLINE_EXCEEDED = "deadline_exceeded"
_MESSAGES = {
    EXHAUSTED: f"no worker finished it in {topology.MAX_DELIVERIES} deliveries",
    DEADLINE_EXCEEDED: "the deadline has passed",
}


def parse_advisory(subject: str, headers: Mapping[str, str], payload: bytes) -> int | None:
    """Return the sequence in WORK of what has used up its deliveries; None if this is no advisory.

    Whoever may read a stored message can have it sent to where advisories are heard. A message that
    was read has headers, and one that a consumer delivers has the subject that it was stored under;
    the broker's own advisories have neither.
    """
    if headers or not subject.startswith(_ADVISORY):
        return None
    try:
        found = orjson.loads(payload)
    except ValueError:
        return None
    seq = found.get("stream_seq") if isinstance(found, dict) else None
    return seq if isinstance(seq, int) else None


def is_overdue(deadline: int, now: float) -> bool:
    """Return True if a deadline passed so long ago that no worker can still be at the request.

    That is more than `GRACE_SECONDS` (3 s). `deadline` is epoch milliseconds, `now` epoch seconds.
    """
    return deadline / 1000 + GRACE_SECONDS < now


async def end_undeliverable(broker: Broker, message: StoredMessage, shards: int) -> None:
    """End the request of a message in WORK that no worker could finish, and remove the message.

    The request ends with `deadline_exceeded` if its deadline has passed. Otherwise it ends with
    `attempts_exhausted`, and a dead letter is stored for the operator; if the headers cannot be
    read, there is only the dead letter. The dead letter is stored first and the message removed
    last, so that a crash in between repeats, never loses. Raises `BrokerUnavailable` if the broker
    does not answer, `StoreRefused` if it refuses.
    """
    envelope = parse_envelope(message.headers)
    model = subjects.parse_work(message.subject).model
    reason = _reason(envelope, broker.clock.now())
    if reason != DEADLINE_EXCEEDED:
        history = await _read_history(broker, envelope, shards) if envelope else AttemptHistory()
        await store_dead_letter(broker, message, envelope, reason, history)
    if envelope:
        await write_terminal(broker, envelope, model, reason, _MESSAGES[reason], shards)
    if await broker.remove(topology.WORK, message.seq):  # False: somebody else has removed it
        request_id = envelope and envelope.request_id
        log.warning("work_undeliverable", request_id=request_id, seq=message.seq, reason=reason)


async def _read_history(broker: Broker, envelope: Envelope, shards: int) -> AttemptHistory:
    address = LogAddress(envelope.tenant, envelope.route, envelope.request_id)
    return await attempt_history.read_history(
        broker, address, await TokenLog(broker, address, shards).read()
    )


def _reason(envelope: Envelope | None, now: float) -> str:
    """Why a message cannot be delivered: malformed, past its deadline, or deliveries exhausted."""
    if envelope is None:
        return MALFORMED
    return DEADLINE_EXCEEDED if envelope.deadline / 1000 < now else EXHAUSTED
