"""The way in: from a submission to a durable request."""

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
from gateway.replies import request_lookup
from gateway.replies.log_subscription import LogSubscription, Sink
from gateway.replies.relay import Relay
from registry.models import Model
from registry.tenant_records import Tenant
from streams import messages, subjects
from streams.broker.connection import Broker, PubAck
from streams.broker.retry import broker_timeout
from streams.errors import MillstreamError
from streams.headers import MESSAGE_ID
from streams.messages import Pressure, Record
from streams.records import lanes
from streams.records.token_log import Fenced, TokenLog
from streams.subjects import Lane, LogAddress

ACCEPT_SECONDS = 2.5  # an unreachable broker is a 503 after this
_PRODUCER_KEY_PREFIX = "submitted\n"  # keeps producers' keys apart from those in headers and frames
_EXPIRY_MARGIN_SECONDS = 15.0  # by so long after its deadline a request has ended or never was


@dataclass(frozen=True)
class Ticket:
    """An accepted request that is followed here: it will end in exactly one terminal."""

    request_id: str
    model: Model
    subscription: LogSubscription
    admit_ms: float  # from the submission to the broker's confirmation


class Submitter:
    """Accepts requests for this gateway."""

    def __init__(self, broker: Broker, preparation: SubmissionValidator, relay: Relay) -> None:
        self.validator = preparation
        self._broker, self._relay = broker, relay
        self._idempotency = IdempotencyStore(broker)
        self.quotas = Quotas(broker)
        self._load_shedders: dict[str, LoadShedder] = defaultdict(LoadShedder)
        self._lane_locks: dict[Lane, asyncio.Lock] = {}
        self.max_queued = 1  # the stream's own bound on a lane
        self.has_had_workers = False

    async def open(self, replicas: int) -> None:
        await self._idempotency.open(replicas)
        await self.quotas.open()
        await self._broker.subscribe(subjects.ALL_PRESSURE, self._on_pressure)

    async def _on_pressure(self, msg: Msg) -> None:
        pressure = Pressure.unpack(msg.data)
        self._load_shedders[pressure.model].update(pressure, time.monotonic())
        self.has_had_workers = self.has_had_workers or pressure.workers > 0

    def worker_count(self, model: str) -> int:
        """How many workers serve a model, as far as its dispatcher has told."""
        return self._load_shedders[model].worker_count if model in self._load_shedders else 0

    async def submit(
        self, tenant: Tenant, submission: Submission, sink: Sink, key: str | None = None
    ) -> Ticket:
        """Accept a request, or attach to the one that the idempotency key stands for.

        Returns once the broker has stored it. Raises any `BadRequest` or `Refused`. When it is
        cancelled the request may have been accepted; it is then cancelled too.
        """
        (prepared,) = await self.validator.validate(tenant, submission)
        return await self.submit_validated(prepared, sink, key)

    async def submit_validated(
        self, prepared: ValidatedRequest, sink: Sink, key: str | None = None
    ) -> Ticket:
        """As `submit`, of what has been prepared."""
        with self._relay.recording_refusals():
            async with broker_timeout(ACCEPT_SECONDS):
                following = await self._subscribe_and_publish(prepared, sink, key)
        spent = (time.monotonic() - prepared.started_at) * 1000
        return Ticket(following.request_id, prepared.model, following, spent)

    async def _subscribe_and_publish(
        self, prepared: ValidatedRequest, sink: Sink, key: str | None
    ) -> LogSubscription:
        following, first = await self._subscribe(prepared, sink, key)
        if not following.is_durable:
            following.expires_at = (
                time.monotonic() + prepared.deadline_seconds + _EXPIRY_MARGIN_SECONDS
            )
            keyed = key is not None
            following = await self._publish(prepared, following, first=first, keyed=keyed)
        return following

    async def submit_for_producer(
        self, tenant: Tenant, submission: Submission, key: str, route: str, shards: int
    ) -> None:
        """Accept a request whose replies go to a producer's own route.

        The first record of its log tells the producer which of its keys became which request. All
        of it may be repeated: the key stands for one request. Raises as `submit` does.
        """
        (prepared,) = await self.validator.validate(tenant, submission)
        made, scoped = secrets.token_hex(16), _PRODUCER_KEY_PREFIX + key
        known = await self._idempotency.claim(tenant.name, scoped, made, submission.digest)
        if not known.is_first and await request_lookup.is_request_known(
            self._broker, tenant.name, known.request_id
        ):
            return  # an earlier delivery was here: only its acknowledgement got lost
        token_log = TokenLog(self._broker, LogAddress(tenant.name, route, known.request_id), shards)
        try:
            await token_log.append(messages.accepted_record(key, known.request_id))
        except Fenced:
            pass  # an earlier delivery of the same submission was here
        await self._reserve_and_enqueue(prepared, known.request_id, route, first=known.is_first)

    async def find_producer_request(self, tenant: str, key: str) -> str | None:
        """The id of the request that a producer's key has become, if any."""
        return await self._idempotency.find(tenant, _PRODUCER_KEY_PREFIX + key)

    async def _subscribe(
        self, prepared: ValidatedRequest, sink: Sink, key: str | None
    ) -> tuple[LogSubscription, bool]:
        """A new request's following, or that of the request which `key` stands for; is it new?"""
        tenant, request_id = prepared.tenant.name, secrets.token_hex(16)
        if key is not None:
            digest = prepared.submission.digest
            known = await self._idempotency.claim(tenant, key, request_id, digest)
            if not known.is_first:
                return await self._relay.subscribe_existing(tenant, known.request_id, sink), False
        return self._relay.subscribe_new(tenant, request_id, sink), True

    async def _publish(
        self, prepared: ValidatedRequest, following: LogSubscription, *, first: bool, keyed: bool
    ) -> LogSubscription:
        """Queue the request. Returns the following to use: another one if somebody was faster.

        Whether the broker has a request that it did not confirm is unknown. It is cancelled, with a
        key only when the grace period has passed: asked for again it is this very request.
        """
        sink, quotas = following.sink, self.quotas
        following.sink = _settling_sink(quotas, prepared.tenant, following.request_id, sink)
        unsure = self._relay.orphan if keyed else self._relay.cancel_unconfirmed
        try:
            route = self._relay.route
            stored = await self._reserve_and_enqueue(
                prepared, following.request_id, route, first=first
            )
        except MillstreamError as error:
            if error.may_have_succeeded:
                unsure(following)
            else:
                await self._relay.unsubscribe(following)
            raise
        except BaseException:
            unsure(following)
            raise
        if (
            not stored.duplicate or following.last_seq
        ):  # replies come here: this was first after all
            following.is_durable = True
            return following
        await self._relay.unsubscribe(following)  # the replies go to the route of who was first
        return await self._relay.subscribe_existing(
            prepared.tenant.name, following.request_id, sink
        )

    async def _reserve_and_enqueue(
        self, prepared: ValidatedRequest, request_id: str, route: str, *, first: bool
    ) -> PubAck:
        """Look at the wait, reserve its quotas and enter the lane; what stays out gives them back.

        Where that is not known it counts as open no more, and the rest of its reservation ends with
        the request, or expires. With `first` the id was made here: after a try without an answer a
        duplicate is of that try, which these quotas are for.
        """
        wait = self._load_shedders[prepared.model.name].admit(
            _latency_target(prepared), time.monotonic()
        )
        expires = prepared.deadline_seconds + _EXPIRY_MARGIN_SECONDS
        hold = await self.quotas.reserve(prepared.tenant, request_id, prepared.amounts, expires)
        try:
            stored = await self._enqueue(prepared, request_id, route, wait)
        except BaseException as error:
            if hold:
                known = isinstance(error, MillstreamError) and not error.may_have_succeeded
                (self.quotas.release if known else self.quotas.release_unconfirmed)(hold)
            raise
        if hold and stored.duplicate and not (first and stored.repeated):
            self.quotas.release(hold)
        return stored

    async def _enqueue(
        self, prepared: ValidatedRequest, request_id: str, route: str, wait: float | None
    ) -> PubAck:
        """Enter the lane; the broker recognises a request id that it has already."""
        account = self.quotas.packed_account(request_id)
        now = self._broker.clock.now_ms()
        envelope = prepared.build_envelope(request_id, route, account, wait, now)
        headers = envelope.to_headers() | {MESSAGE_ID: request_id}
        payload, lane, limit = prepared.packed.payload, prepared.lane, prepared.tenant.max_queued
        if limit >= self.max_queued:
            return await lanes.enqueue(self._broker, lane, payload, headers, ACCEPT_SECONDS)
        async with self._lane_locks.setdefault(lane, asyncio.Lock()):
            return await lanes.enqueue_below(
                self._broker, lane, payload, headers, ACCEPT_SECONDS, limit
            )


def _latency_target(validated: ValidatedRequest) -> LatencyTarget:
    """What load shedding needs to decide whether the request can be answered in time."""
    return LatencyTarget(
        validated.tenant.name,
        validated.submission.priority,
        validated.packed.prompt_tokens,
        validated.packed.cost,
        validated.deadline_seconds,
        first_token_goal_seconds(validated.model.goals, validated.submission.priority),
    )


def _settling_sink(quotas: Quotas, tenant: Tenant, request_id: str, sink: Sink) -> Sink:
    """A sink that settles the request's quotas at its terminal, before its client sees it."""
    if not quota_scopes(tenant):
        return sink

    def put(record: Record, size: int) -> bool:
        if record["type"] in messages.TERMINAL_TYPES:
            quotas.settle(request_id, record["usage"]["total_tokens"])
        return sink(record, size)

    return put
