"""Work that no worker could finish: ended for the client, kept for the operator, out of the way.

The broker tells of a message that has used up its deliveries, once and without guarantee; the audit
finds what that missed, and what has outlived its deadline.
"""

import structlog

from dispatcher.ending import end
from streams import history, subjects, topology
from streams.connection import Broker, StoredMessage
from streams.dead_letters import EXHAUSTED, MALFORMED, envelope_of, keep
from streams.headers import Envelope
from streams.history import History
from streams.subjects import Log
from streams.token_log import TokenLog

log = structlog.get_logger()

ADVISORIES = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{topology.WORK}.*"
GRACE_SECONDS = 3.0  # a worker enforces the deadline itself; only a silent one is overtaken
LATE = "deadline_exceeded"
_MESSAGES = {
    EXHAUSTED: f"no worker finished it in {topology.MAX_DELIVERIES} deliveries",
    LATE: "the deadline has passed",
}


def overdue(deadline: int, now: float) -> bool:
    """True when a deadline (ms) has passed by so much that no worker can be at it."""
    return deadline / 1000 + GRACE_SECONDS < now


async def bury(broker: Broker, message: StoredMessage, shards: int) -> None:
    """End a message of WORK as failed, or as expired when its deadline has passed, and remove it.

    The dead letter is stored first, the work removed last: a crash in between repeats, never loses.
    """
    envelope = envelope_of(message.headers)
    model = subjects.parse_work(message.subject).model
    reason = _reason(envelope, broker.clock.now())
    if reason != LATE:
        tried = await _tried(broker, envelope, shards) if envelope else History()
        await keep(broker, message, envelope, reason, tried)
    if envelope:
        await end(broker, envelope, model, reason, _MESSAGES[reason], shards)
    if await broker.remove(topology.WORK, message.seq):  # else somebody else has
        request_id = envelope and envelope.request_id
        log.warning("work_buried", request_id=request_id, seq=message.seq, reason=reason)


async def _tried(broker: Broker, envelope: Envelope, shards: int) -> History:
    address = Log(envelope.tenant, envelope.route, envelope.request_id)
    return await history.read(broker, address, await TokenLog(broker, address, shards).read())


def _reason(envelope: Envelope | None, now: float) -> str:
    if envelope is None:
        return MALFORMED
    return LATE if envelope.deadline / 1000 < now else EXHAUSTED
