"""Work that no worker could finish: ended for the client, kept for the operator, out of the way.

The broker tells of a message that has used up its deliveries, once and without guarantee; the audit
finds what that missed, and what has outlived its deadline.
"""

import time

import structlog
from nats.js.errors import NotFoundError

from dispatcher.ending import end
from streams import subjects, topology
from streams.connection import Broker, StoredMessage
from streams.dead_letters import keep
from streams.headers import Envelope

log = structlog.get_logger()

ADVISORIES = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{topology.WORK}.*"
GRACE_SECONDS = 3.0  # a worker enforces the deadline itself; only a silent one is overtaken
EXHAUSTED, LATE, MALFORMED = "attempts_exhausted", "deadline_exceeded", "malformed"
_MESSAGES = {
    EXHAUSTED: f"no worker finished it in {topology.MAX_DELIVERIES} deliveries",
    LATE: "the deadline has passed",
}


def envelope_of(message: StoredMessage) -> Envelope | None:
    """What the headers of work say; None when they are not ours."""
    try:
        return Envelope.from_headers(message.headers)
    except (KeyError, ValueError):
        return None


def overdue(deadline: int, now: float) -> bool:
    """True when a deadline (ms) has passed by so much that no worker can be at it."""
    return deadline / 1000 + GRACE_SECONDS < now


async def bury(broker: Broker, message: StoredMessage, shards: int) -> None:
    """End a message of WORK as failed, or as expired when its deadline has passed, and remove it.

    The dead letter is stored first, the work removed last: a crash in between repeats, never loses.
    """
    envelope = envelope_of(message)
    model = subjects.parse_work(message.subject).model
    reason = _reason(envelope)
    if reason != LATE:
        await keep(broker, message, envelope, model, reason)
    if envelope:
        await end(broker, envelope, model, reason, _MESSAGES[reason], shards)
    try:
        await broker.js.delete_msg(topology.WORK, message.seq)
    except NotFoundError:
        return  # somebody else has
    log.warning(
        "work_buried", request_id=envelope and envelope.request_id, seq=message.seq, reason=reason
    )


def _reason(envelope: Envelope | None) -> str:
    if envelope is None:
        return MALFORMED
    return LATE if envelope.deadline / 1000 < time.time() else EXHAUSTED
