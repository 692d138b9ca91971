"""NATS ingress: pulls the submissions that producers publish to NATS, and submits them.

A tenant's stream holds its submissions until a gateway has made a durable request of each. The
producer's `Nats-Msg-Id` is its idempotency key, so a submission that is delivered twice is one
request. A submission that cannot be accepted just now stays in the stream and is tried again; one
that never can be is answered with an error, on the route `none` if it names no route.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from email.message import Message

import structlog

from api.schemas.parsing import decode, parse_submission
from api.schemas.websocket_frames import SubmissionBody
from api.submission.submission_record import Submission
from gateway.admission.producer_requests import ReplyWish
from gateway.context import GatewayContext
from streams import messages, subjects, topology
from streams.broker import declaration
from streams.broker.declaration import TopologyMismatch
from streams.broker.pull_loop import Delivery, PullLoop
from streams.broker.retry import retry_forever
from streams.errors import (
    AnswerLost,
    BadRequest,
    BrokerUnavailable,
    Forbidden,
    IdempotencyConflict,
    MillstreamError,
    QuotaSpent,
    Refused,
)
from streams.headers import ACCEPT, ANSWER, CONTENT_TYPE, MESSAGE_ID, ROUTE
from streams.messages import Encoding
from streams.subjects import Lane

log = structlog.get_logger()

MAX_CONCURRENT = 64  # submissions of one tenant that this gateway processes at once
DEFAULT_ROUTE, DURABLE = "none", "durable"
_RETRY_SECONDS = 1.0
COPY_SECONDS = 0.5  # between two looks at a log that is copied to another route
_FIRST_DECLARE_SECONDS, _MAX_DECLARE_SECONDS = 1.0, 60.0  # between two refused declarations
_CHARSETS = ("", "utf-8", "utf8", "us-ascii")
_ENCODINGS: Mapping[str, Encoding] = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
}


class NatsIngress:
    """Turns the submissions that one tenant's producers publish to NATS into queued requests.

    Each gateway runs one for each tenant that publishes; together they share the tenant's stream.
    """

    def __init__(self, context: GatewayContext, tenant: str) -> None:
        self._context, self._tenant = context, tenant
        self._in_flight = 0
        self._delayed: dict[int, str] = {}  # why each submission was delayed, by its sequence
        self._tasks: asyncio.TaskGroup | None = None
        self._pull: PullLoop | None = None

    async def run(self) -> None:
        """Pull submissions and queue them, at most `MAX_CONCURRENT` at once, until cancelled.

        Submissions under way at that time are delivered again, to any gateway. While the broker
        does not answer, has no stream of the tenant, or refuses the consumer, this tries again and
        again; a refusal is logged.
        """
        broker, stream = self._context.broker, topology.ingress_stream_name(self._tenant)
        await self._declare_patiently()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._pull = PullLoop(
                broker,
                stream,
                topology.INGRESS_CONSUMER,
                lambda: MAX_CONCURRENT - self._in_flight,
                self._start,
                self._declare_patiently,
            )
            await retry_forever(self._pull.run)

    async def _declare_patiently(self) -> None:
        """Declare until the broker agrees; where it refuses, say why and try ever less often."""
        seconds = _FIRST_DECLARE_SECONDS
        while True:
            try:
                return await retry_forever(self._declare)
            except TopologyMismatch as refusal:
                if seconds == _FIRST_DECLARE_SECONDS:
                    log.error("ingress_refused", tenant=self._tenant, reason=str(refusal))
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, _MAX_DECLARE_SECONDS)

    async def _declare(self) -> None:
        stream = topology.ingress_stream_name(self._tenant)
        await declaration.declare_consumer(
            self._context.broker, stream, topology.ingress_consumer(self._tenant)
        )

    def _start(self, delivery: Delivery) -> None:
        assert self._tasks
        self._in_flight += 1
        self._tasks.create_task(self._process(delivery), name=f"submission-{delivery.seq}")

    async def _process(self, delivery: Delivery) -> None:
        try:
            if await self._settle(delivery):
                self._delayed.pop(delivery.seq, None)
        except BrokerUnavailable as error:  # it is delivered again after its ack wait
            log.warning("submission_not_settled", tenant=self._tenant, reason=str(error))
        finally:
            assert self._pull
            self._in_flight -= 1
            self._pull.wake()

    async def _settle(self, delivery: Delivery) -> bool:
        """Submit a delivery, leave it for later, or refuse it; False if it was left for later.

        Raises `BrokerUnavailable`.
        """
        try:
            return await self._submit(delivery)
        except QuotaSpent as refusal:  # the producer should learn of it now, not tomorrow
            await self._refuse(delivery, refusal)
        except Refused as refusal:
            await self._redeliver_later(delivery, refusal)
            return False
        except MillstreamError as error:
            await self._refuse(delivery, error)
        except Exception:  # our own fault: one submission's end, not the gateway's
            log.exception("submission_failed", tenant=self._tenant)
            await self._refuse(delivery, MillstreamError("the gateway failed; its log says why"))
        return True

    async def _submit(self, delivery: Delivery) -> bool:
        """Submit a delivery and acknowledge it; False if more is to be copied for it later."""
        tenant = self._context.tenants.get(self._tenant)
        if tenant is None:
            raise Forbidden(f"the tenant {self._tenant!r} is gone")
        submission = await self._context.offload_thread.run(
            len(delivery.data), _to_submission, delivery
        )
        wish = _parse_wish(delivery)
        (validated,) = await self._context.preparation.validate(tenant, submission)
        if await self._context.producer_requests.submit(validated, wish):
            await delivery.ack()
            return True
        await delivery.nak(COPY_SECONDS)
        return False

    async def _redeliver_later(self, delivery: Delivery, refusal: Refused) -> None:
        """Leave a submission in the stream for a while, where waiting is durable.

        Reasons are a full lane, or a broker that cannot be reached. Each is logged once.
        """
        if self._delayed.get(delivery.seq) != refusal.code:
            self._delayed[delivery.seq] = refusal.code
            self._log(delivery, refusal, "submission_delayed")
        await delivery.nak(refusal.retry_after_seconds or _RETRY_SECONDS)

    async def _refuse(self, delivery: Delivery, error: MillstreamError) -> None:
        """Answer a submission that can never be accepted with an error, and end its delivery."""
        self._log(delivery, error, "submission_refused")
        self._count_refusal(delivery, error)
        await self._append_error(delivery, error)
        await delivery.terminate()

    def _log(self, delivery: Delivery, error: MillstreamError, event: str) -> None:
        log.info(
            event,
            tenant=self._tenant,
            id=_idempotency_key(delivery),
            sequence=delivery.seq,
            code=error.code,
            reason=str(error),
        )

    def _count_refusal(self, delivery: Delivery, error: MillstreamError) -> None:
        model, priority = "", ""
        with suppress(BadRequest):
            _, model, priority = _parse_lane(delivery.subject)
        self._context.refusals.count(self._tenant, error.code, model, priority)

    async def _append_error(self, delivery: Delivery, error: MillstreamError) -> None:
        wish, request_id = _guess_wish(delivery), None
        if isinstance(error, IdempotencyConflict | AnswerLost):  # what is stored is another's
            wish = replace(wish, answer_key=None)
        else:  # where there is a request `accepted` was said already
            request_id = await self._context.producer_requests.find_request(self._tenant, wish.key)
        terminal = messages.error_record(error.code, error.message, messages.openai_usage(0, 0))
        await self._context.producer_requests.refuse(
            self._tenant, wish, request_id or f"refused-{delivery.seq}", terminal
        )


def _to_submission(delivery: Delivery) -> Submission:
    return Submission.from_body(_parse(delivery))


def _parse(delivery: Delivery) -> SubmissionBody:
    lane = _parse_lane(delivery.subject)
    payload = decode(delivery.data, _parse_encoding(delivery.headers.get(CONTENT_TYPE)))
    return parse_submission(payload, lane.model, lane.priority)


def _parse_encoding(content_type: str | None) -> Encoding:
    """The encoding that a Content-Type names, whatever its case and parameters; JSON for none."""
    header = Message()
    header["Content-Type"] = content_type or "application/json"
    name, charset = header.get_content_type(), header.get_param("charset", "")
    if name not in _ENCODINGS or (content_type and "/" not in content_type):
        raise BadRequest(f"Content-Type {content_type!r} must be one of: {', '.join(_ENCODINGS)}")
    if str(charset).lower() not in _CHARSETS:
        raise BadRequest(f"the charset {charset!r} must be utf-8")
    return _ENCODINGS[name]


def _parse_lane(subject: str) -> Lane:
    """The lane that a stranger's subject names; raises `BadRequest` if it names none."""
    try:
        return subjects.parse_lane(subject)
    except ValueError as error:
        raise BadRequest(f"the subject {subject!r} names no lane: {error}") from None


def _idempotency_key(delivery: Delivery) -> str:
    """The producer's own id of the submission, or else its sequence in the stream."""
    return delivery.headers.get(MESSAGE_ID) or f"sequence-{delivery.seq}"


def _parse_wish(delivery: Delivery) -> ReplyWish:
    """Return what a submission's headers ask of its replies; raises `BadRequest` for wrong ones."""
    return ReplyWish(
        _idempotency_key(delivery),
        _reply_route(delivery),
        _reply_encoding(delivery),
        _answer_key(delivery),
        delivery.stored_at,
    )


def _guess_wish(delivery: Delivery) -> ReplyWish:
    """Return the wish as far as it can be read, where a header may be wrong."""
    wish = ReplyWish(_idempotency_key(delivery), DEFAULT_ROUTE)
    with suppress(BadRequest):
        wish = replace(wish, route=_reply_route(delivery))
    with suppress(BadRequest):
        wish = replace(wish, encoding=_reply_encoding(delivery))
    with suppress(BadRequest):
        wish = replace(wish, answer_key=_answer_key(delivery))
    return wish


def _reply_encoding(delivery: Delivery) -> Encoding:
    """The encoding that the header `Accept` names; msgpack without one."""
    accepted = delivery.headers.get(ACCEPT, "*/*").partition(";")[0].strip().lower()
    if accepted != "*/*" and accepted not in _ENCODINGS:
        raise BadRequest(f"{ACCEPT} {accepted!r} must be one of: {', '.join(_ENCODINGS)}", ACCEPT)
    return _ENCODINGS.get(accepted, "msgpack")


def _answer_key(delivery: Delivery) -> str | None:
    """The producer's id, escaped, if it wants a durable answer under that; None if not."""
    told = delivery.headers.get(ANSWER)
    if told is None:
        return None
    if told != DURABLE:
        raise BadRequest(f"{ANSWER} {told!r} must be {DURABLE!r}", ANSWER)
    if MESSAGE_ID not in delivery.headers:
        raise BadRequest(f"a durable answer is found by {MESSAGE_ID}, which is missing", ANSWER)
    try:
        return subjects.escape(delivery.headers[MESSAGE_ID])
    except subjects.InvalidToken as error:
        raise BadRequest(str(error), MESSAGE_ID) from None


def _reply_route(delivery: Delivery) -> str:
    """The route of the replies; raises `BadRequest` if the header is not a subject token."""
    try:
        return subjects.token(delivery.headers.get(ROUTE, DEFAULT_ROUTE))
    except subjects.InvalidToken as error:
        raise BadRequest(str(error), ROUTE) from None
