"""What producers publish to NATS comes in by the same way as everything else.

A tenant's stream holds its submissions until a gateway has made a durable request of each. The
producer's `Nats-Msg-Id` is its idempotency key, so a submission that is delivered twice is one
request. What cannot be accepted just now stays in the stream and is tried again.
"""

import asyncio
from collections.abc import Mapping

import structlog

from gateway.door import Door
from gateway.schemas.frames import Submitted
from gateway.schemas.reading import Encoding, decode, parse_submission
from gateway.submission import Submission
from streams import declaration, messages, subjects, topology
from streams.errors import (
    BadRequest,
    BrokerUnavailable,
    Forbidden,
    MillstreamError,
    QuotaSpent,
    Refused,
)
from streams.headers import CONTENT_TYPE, MESSAGE_ID, ROUTE
from streams.patience import persistently
from streams.pull import Delivery, Pull
from streams.subjects import Lane, Log
from streams.token_log import Fenced, TokenLog

log = structlog.get_logger()

AT_ONCE = 64  # submissions of one tenant that this gateway accepts side by side
DEFAULT_ROUTE = "none"
_RETRY_SECONDS = 1.0
_ENCODINGS: Mapping[str, Encoding] = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
}


class Ingress:
    """Takes in one tenant's submissions."""

    def __init__(self, door: Door, tenant: str, scale: topology.Scale) -> None:
        self._door, self._tenant, self._scale = door, tenant, scale
        self._busy = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._pull: Pull | None = None

    async def run(self) -> None:
        """Pull until cancelled; what is under way then is delivered again to another gateway."""
        broker, stream = self._door.broker, topology.ingress(self._tenant)
        await persistently(self._declare)
        consumer = topology.ingress_consumer().durable_name
        assert consumer
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._pull = Pull(
                broker, stream, consumer, lambda: AT_ONCE - self._busy, self._take, self._declare
            )
            await persistently(self._pull.run)

    async def _declare(self) -> None:
        broker, stream = self._door.broker, topology.ingress_stream(self._tenant)
        await declaration.declare_stream(broker, stream, self._scale)
        await declaration.declare_consumer(
            broker, topology.ingress(self._tenant), topology.ingress_consumer()
        )

    def _take(self, delivery: Delivery) -> None:
        assert self._tasks
        self._busy += 1
        self._tasks.create_task(self._accept(delivery), name=f"submission-{delivery.seq}")

    async def _accept(self, delivery: Delivery) -> None:
        try:
            await self._settle(delivery)
        except BrokerUnavailable as error:  # its ack wait brings it back
            log.warning("submission_unsettled", tenant=self._tenant, reason=str(error))
        finally:
            assert self._pull
            self._busy -= 1
            self._pull.wake()

    async def _settle(self, delivery: Delivery) -> None:
        """Accept it, leave it for later, or end it; raises `BrokerUnavailable`."""
        try:
            await self._submit(delivery)
        except QuotaSpent as refusal:  # its producer should know that now, not tomorrow
            await self._refuse(delivery, refusal)
        except Refused as refusal:
            await self._later(delivery, refusal)
        except MillstreamError as error:
            await self._refuse(delivery, error)
        except Exception:  # our own fault: one submission's end, not the gateway's
            log.exception("submission_failed", tenant=self._tenant)
            await self._refuse(delivery, MillstreamError("the gateway failed; its log says why"))

    async def _submit(self, delivery: Delivery) -> None:
        tenant = self._door.tenants.get(self._tenant)
        if tenant is None:
            raise Forbidden(f"the tenant {self._tenant!r} is gone")
        submission = await self._door.porter.carry(len(delivery.data), _submission, delivery)
        route, shards = _route(delivery), self._scale.shards
        await self._door.intake.forward(tenant, submission, _key(delivery), route, shards)
        await delivery.ack()

    async def _later(self, delivery: Delivery, refusal: Refused) -> None:
        """A full lane or an unreachable broker: it waits where waiting is durable."""
        log.info("submission_waits", tenant=self._tenant, code=refusal.code)
        await delivery.nak(refusal.retry_after_seconds or _RETRY_SECONDS)

    async def _refuse(self, delivery: Delivery, error: MillstreamError) -> None:
        """What can never be accepted ends with an error on its route, and leaves the stream."""
        log.info("submission_refused", tenant=self._tenant, code=error.code, reason=str(error))
        await self._end(delivery, error)
        await delivery.terminate()

    async def _end(self, delivery: Delivery, error: MillstreamError) -> None:
        try:
            route = _route(delivery)
        except BadRequest:
            return  # there is nowhere to answer; the log line has it
        key = _key(delivery)
        known = await self._door.intake.forwarded(self._tenant, key)  # `accepted` was said already
        address = Log(self._tenant, route, known or f"refused-{delivery.seq}")
        token_log = TokenLog(self._door.broker, address, self._scale.shards)
        terminal = messages.failed(error.code, error.message, messages.usage(0, 0))
        try:
            if (await token_log.read()).terminal is None:
                await token_log.append(terminal | {"id": key})
        except Fenced:
            pass  # an earlier delivery was answered in the same way


def _submission(delivery: Delivery) -> Submission:
    return Submission.of(_parse(delivery))


def _parse(delivery: Delivery) -> Submitted:
    lane = _lane(delivery.subject)
    name = delivery.headers.get(CONTENT_TYPE, "application/json")
    if name not in _ENCODINGS:
        raise BadRequest(f"Content-Type {name!r} must be one of: {', '.join(_ENCODINGS)}")
    wire = decode(delivery.data, _ENCODINGS[name])
    return parse_submission(wire, lane.model, lane.priority)


def _lane(subject: str) -> Lane:
    """The lane that a stranger's subject names; raises `BadRequest` if it names none."""
    try:
        return subjects.parse_lane(subject)
    except ValueError as error:
        raise BadRequest(f"the subject {subject!r} names no lane: {error}") from None


def _key(delivery: Delivery) -> str:
    """The producer's own id of the submission, or its place in the stream."""
    return delivery.headers.get(MESSAGE_ID) or f"sequence-{delivery.seq}"


def _route(delivery: Delivery) -> str:
    """Where the replies go; raises `BadRequest` for what is no subject token."""
    try:
        return subjects.token(delivery.headers.get(ROUTE, DEFAULT_ROUTE))
    except subjects.InvalidToken as error:
        raise BadRequest(str(error), ROUTE) from None
