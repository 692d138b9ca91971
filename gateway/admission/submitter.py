"""Submits requests: makes a durable request of a submission, whichever entry point it came by."""

import asyncio
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass

from nats.aio.msg import Msg

from api.submission.quota_checks import quota_scopes
from api.submission.quotas import Quotas
from api.submission.submission import Submission
from api.submission.validation import SubmissionValidator, ValidatedRequest
from gateway.admission.idempotency import IdempotencyStore
from gateway.admission.load_shedding import (
    LatencyTarget,
    LoadShedder,
    first_token_goal_seconds,
)
from gateway.admission.offload import OffloadThread
from gateway.replies import request_lookup
from gateway.replies.log_subscription import LogSubscription, Sink
from gateway.replies.relay import Relay
from registry.models import Model
from registry.tenant_records import Tenant
from streams import messages, subjects, topology
from streams.broker.connection import Broker, PubAck
from streams.broker.retry import broker_timeout
from streams.broker.stream_declarer import StreamDeclarer
from streams.errors import IdempotencyConflict, MillstreamError, Overloaded, RequestNotFound
from streams.headers import MESSAGE_ID
from streams.messages import Pressure, Record
from streams.records import lanes
from streams.records.token_log import Fenced, TokenLog
from streams.subjects import Lane, LogAddress

ACCEPT_SECONDS = 2.5  # an unreachable broker is a 503 after this
_PRODUCER_KEY_PREFIX = "submitted\n"  # keeps producers' keys apart from those in headers and frames
_UNUSABLE = "the message broker refuses a stream that requests need; an operator must look at it"
_UNUSABLE_RETRY_SECONDS = 10.0
_EXPIRY_MARGIN_SECONDS = 15.0  # so long after its deadline a request has ended or was never stored


@dataclass(frozen=True)
class Ticket:
    """An accepted request, to whose token log (its stored answer) this gateway is subscribed.

    The subscription's sink gets the records of the log; exactly one of them, the last, is a `done`
    or an `error`. `admit_ms` is the time from the submission to the broker's confirmation.
    """

    request_id: str
    model: Model
    subscription: LogSubscription
    admit_ms: float  # from the submission to the broker's confirmation
    is_new: bool = True  # False: an idempotency key led to a request that was there already


class Submitter:
    """Turns submissions into queued requests, for this gateway.

    Call `open` before the first request.
    """

    def __init__(
        self,
        broker: Broker,
        validator: SubmissionValidator,
        relay: Relay,
        streams: StreamDeclarer,
        offload_thread: OffloadThread,
    ) -> None:
        self.validator = validator
        self._offload_thread = offload_thread
        self._streams = streams
        self._broker, self._relay = broker, relay
        self._idempotency = IdempotencyStore(broker)
        self.quotas = Quotas(broker)
        self._load_shedders: dict[str, LoadShedder] = defaultdict(LoadShedder)
        self._lane_locks: dict[Lane, asyncio.Lock] = {}
        self.has_had_workers = False

    async def open(self, replicas: int) -> None:
        """Create the store of idempotency keys; subscribe to the ledger and to load reports.

        Raises `BrokerUnavailable`, or `TopologyMismatch` if the broker refuses the store.
        """
        await self._idempotency.open(replicas)
        await self.quotas.open()
        await self._broker.subscribe(subjects.ALL_PRESSURE, self._on_pressure)

    async def _on_pressure(self, msg: Msg) -> None:
        pressure = Pressure.unpack(msg.data)
        self._load_shedders[pressure.model].update(pressure, time.monotonic())
        self.has_had_workers = self.has_had_workers or pressure.workers > 0

    def worker_count(self, model: str) -> int:
        """Return how many workers serve a model, by its dispatcher's last report; 0 without one."""
        return self._load_shedders[model].worker_count if model in self._load_shedders else 0

    async def submit(
        self, tenant: Tenant, submission: Submission, sink: Sink, key: str | None = None
    ) -> Ticket:
        """Validate and queue a request; return once the broker has stored it.

        If the idempotency `key` was used before for an equal submission, the result is that earlier
        request, which is not queued again if the broker has it. `sink` gets the records. Raises a
        `BadRequest` or a `Refused` that says why the request is not accepted. After a
        `BrokerUnavailable` or a cancellation the request may have been stored; then it is
        cancelled, with a key only after the grace period.
        """
        (validated,) = await self.validator.validate(tenant, submission)
        return await self.submit_validated(validated, sink, key)

    async def submit_validated(
        self, validated: ValidatedRequest, sink: Sink, key: str | None = None
    ) -> Ticket:
        """Queue a request that was validated before; otherwise as `submit`."""
        with self._relay.recording_refusals():
            async with broker_timeout(ACCEPT_SECONDS):
                subscription, is_new = await self._subscribe_and_publish(validated, sink, key)
        admit_ms = (time.monotonic() - validated.started_at) * 1000
        return Ticket(subscription.request_id, validated.model, subscription, admit_ms, is_new)

    async def _subscribe_and_publish(
        self, validated: ValidatedRequest, sink: Sink, key: str | None
    ) -> tuple[LogSubscription, bool]:
        subscription, is_new = await self._subscribe(validated, sink, key)
        if subscription.is_durable:
            return subscription, is_new
        seconds = validated.deadline_seconds + _EXPIRY_MARGIN_SECONDS
        subscription.expires_at = time.monotonic() + seconds
        subscription = await self._publish(
            validated, subscription, is_new=is_new, has_key=key is not None
        )
        return subscription, is_new

    async def submit_for_producer(
        self, tenant: Tenant, submission: Submission, key: str, route: str, shards: int
    ) -> None:
        """Validate and queue a request of a NATS producer; return once the broker has stored it.

        The replies go to `route`, which the producer chose. The first record of the request's log
        tells the producer the request id that `key`, its own id, has become. Idempotent: calls with
        the same `key` make one request. Raises as `submit` does, and `IdempotencyConflict` if the
        request of `key` was made with another route.
        """
        (validated,) = await self.validator.validate(tenant, submission)
        request_id, scoped = secrets.token_hex(16), _PRODUCER_KEY_PREFIX + key
        digest = await self._digest(validated)
        known = await self._idempotency.claim(tenant.name, scoped, request_id, digest)
        address = LogAddress(tenant.name, route, known.request_id)
        if not known.is_first:
            await self._check_route(address, shards)
            if await request_lookup.is_request_known(self._broker, tenant.name, known.request_id):
                return  # an earlier delivery got as far: only its acknowledgement was lost
        token_log = TokenLog(self._broker, address, shards)
        try:
            await token_log.append(messages.accepted_record(key, known.request_id))
        except Fenced:
            pass  # an earlier delivery of the same submission has written it
        await self._reserve_and_enqueue(validated, known.request_id, route, is_new=known.is_first)

    async def _check_route(self, address: LogAddress, shards: int) -> None:
        """Raise `IdempotencyConflict` if a request has its log, and its replies, elsewhere."""
        tenant, route, request_id = address
        stream = topology.token_stream_of(request_id, shards)
        pattern = subjects.log_on_any_route(tenant, request_id, shards)
        subject = await self._broker.find_subject(stream, pattern)
        if subject and (first := subjects.parse_log(subject).route) != route:
            raise IdempotencyConflict(
                f"this Nats-Msg-Id is that of the request {request_id}, which answers on the "
                f"route {first!r}"
            )

    async def check_key_known(self, tenant: str, key: str) -> None:
        """Raise `RequestNotFound` if an idempotency key stands for no request of the tenant."""
        with self._relay.recording_refusals():
            async with broker_timeout(ACCEPT_SECONDS):
                if await self._idempotency.find(tenant, key) is None:
                    raise RequestNotFound(f"Idempotency-Key: {key.splitlines()[0]}")

    async def find_producer_request(self, tenant: str, key: str) -> str | None:
        """Return the id of the request that a producer's `key` has become; None if there is none.

        Raises `BrokerUnavailable`.
        """
        return await self._idempotency.find(tenant, _PRODUCER_KEY_PREFIX + key)

    async def _subscribe(
        self, validated: ValidatedRequest, sink: Sink, key: str | None
    ) -> tuple[LogSubscription, bool]:
        """Subscribe to a new request, or to the one that `key` stands for; True if it is new."""
        tenant, request_id = validated.tenant.name, secrets.token_hex(16)
        if key is not None:
            digest = await self._digest(validated)
            known = await self._idempotency.claim(tenant, key, request_id, digest)
            if not known.is_first:
                return await self._relay.subscribe_existing(tenant, known.request_id, sink), False
        return self._relay.subscribe_new(tenant, request_id, sink), True

    async def _digest(self, validated: ValidatedRequest) -> str:
        """The digest of a request's submission, computed in a thread if the request is large."""
        size, submission = len(validated.packed.payload), validated.submission
        return await self._offload_thread.run(size, lambda: submission.digest)

    async def _publish(
        self,
        validated: ValidatedRequest,
        subscription: LogSubscription,
        *,
        is_new: bool,
        has_key: bool,
    ) -> LogSubscription:
        """Queue the request; returns the subscription to use, another one if somebody was faster.

        It is unknown whether the broker has a request that it did not confirm, so it is cancelled;
        with a key only after the grace period, since a retry under the key asks for this request.
        """
        sink, quotas = subscription.sink, self.quotas
        subscription.sink = _settling_sink(quotas, validated.tenant, subscription.request_id, sink)
        give_up = self._relay.orphan if has_key else self._relay.cancel_unconfirmed
        try:
            route = self._relay.route
            stored = await self._reserve_and_enqueue(
                validated, subscription.request_id, route, is_new=is_new
            )
        except MillstreamError as error:
            if error.may_have_succeeded:
                give_up(subscription)
            else:
                await self._relay.unsubscribe(subscription)
            raise
        except BaseException:
            give_up(subscription)
            raise
        # A duplicate with replies on our own route is the request of this very call, tried twice
        if not stored.duplicate or subscription.last_seq:
            subscription.is_durable = True
            return subscription
        await self._relay.unsubscribe(subscription)  # replies go to the route of the first one
        return await self._relay.subscribe_existing(
            validated.tenant.name, subscription.request_id, sink
        )

    async def _reserve_and_enqueue(
        self, validated: ValidatedRequest, request_id: str, route: str, *, is_new: bool
    ) -> PubAck:
        """Shed load, reserve quotas and enqueue; a request that stays out gives its quotas back.

        Refuses all requests while a stream is unusable, since an accepted one might never end.

        Where it is unknown whether it was stored it no longer counts as open, and the rest of its
        reservation ends with the request, or expires. With `is_new` the id was made here: after a
        try without an answer a duplicate is of that try, and the reservation stays.
        """
        if self._streams.unusable:
            raise Overloaded(_UNUSABLE, _UNUSABLE_RETRY_SECONDS)
        wait = self._load_shedders[validated.model.name].admit(
            _latency_target(validated), time.monotonic()
        )
        expiry_seconds = validated.deadline_seconds + _EXPIRY_MARGIN_SECONDS
        reservation = await self.quotas.reserve(
            validated.tenant, request_id, validated.amounts, expiry_seconds
        )
        try:
            stored = await self._enqueue(validated, request_id, route, wait)
        except BaseException as error:
            if reservation:
                is_out = isinstance(error, MillstreamError) and not error.may_have_succeeded
                (self.quotas.release if is_out else self.quotas.release_unconfirmed)(reservation)
            raise
        if reservation and stored.duplicate and not (is_new and stored.repeated):
            self.quotas.release(reservation)
        return stored

    async def _enqueue(
        self, validated: ValidatedRequest, request_id: str, route: str, wait: float | None
    ) -> PubAck:
        """Publish the request to its lane; the broker recognises a request id that it has already.

        A tenant's limit below the stream's own is checked here, one request of the lane at a time.
        """
        account = self.quotas.packed_account(request_id)
        now = self._broker.clock.now_ms()
        envelope = validated.build_envelope(request_id, route, account, wait, now)
        headers = envelope.to_headers() | {MESSAGE_ID: request_id}
        payload, lane, limit = validated.packed.payload, validated.lane, validated.tenant.max_queued
        if limit >= self._streams.lane_limit:
            return await lanes.enqueue(self._broker, lane, payload, headers, ACCEPT_SECONDS)
        async with self._lane_locks.setdefault(lane, asyncio.Lock()):
            return await lanes.enqueue_below(
                self._broker, lane, payload, headers, ACCEPT_SECONDS, limit
            )


def _latency_target(validated: ValidatedRequest) -> LatencyTarget:
    """The facts by which load shedding decides whether the request can be in time."""
    return LatencyTarget(
        validated.tenant.name,
        validated.submission.priority,
        validated.packed.prompt_tokens,
        validated.packed.cost,
        validated.deadline_seconds,
        first_token_goal_seconds(validated.model.goals, validated.submission.priority),
    )


def _settling_sink(quotas: Quotas, tenant: Tenant, request_id: str, sink: Sink) -> Sink:
    """Return a sink that settles the request's quotas at its terminal, before its client sees it.

    For tenants without quotas it is `sink` itself.
    """
    if not quota_scopes(tenant):
        return sink

    def put(record: Record, size: int) -> bool:
        if record["type"] in messages.TERMINAL_TYPES:
            quotas.settle(request_id, record["usage"]["total_tokens"])
        return sink(record, size)

    return put
