"""The way in: from a submission to a durable request."""

import asyncio
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass

from nats.aio.msg import Msg

from gateway import leaders
from gateway.following import Following, Sink
from gateway.idempotency import Idempotency
from gateway.preparation import Preparation, Prepared
from gateway.quotas import Quotas
from gateway.relay import Relay
from gateway.submission import Submission
from gateway.waits import Waits
from registry.models import Model
from registry.tenants import Tenant
from streams import lanes, messages, subjects
from streams.connection import Broker, Stored
from streams.errors import MillstreamError
from streams.headers import MESSAGE_ID
from streams.messages import Pressure
from streams.patience import answered_within
from streams.subjects import Lane, Log
from streams.token_log import Fenced, TokenLog

ACCEPT_SECONDS = 2.5  # an unreachable broker is a 503 after this
_SUBMITTED = "submitted\n"  # keeps producers' keys apart from those in headers and frames
_EXPIRY_SECONDS = 15.0  # by so long after its deadline a request has ended or never was


@dataclass(frozen=True)
class Ticket:
    """An accepted request that is followed here: it will end in exactly one terminal."""

    request_id: str
    model: Model
    following: Following
    admit_ms: float  # from the submission to the broker's confirmation


class Intake:
    """Accepts requests for this gateway."""

    def __init__(self, broker: Broker, preparation: Preparation, relay: Relay) -> None:
        self.preparation = preparation
        self._broker, self._relay = broker, relay
        self._idempotency = Idempotency(broker)
        self.quotas = Quotas(broker)
        self._waits: dict[str, Waits] = defaultdict(Waits)
        self._counting: dict[Lane, asyncio.Lock] = {}
        self.max_queued = 1  # the stream's own bound on a lane
        self.has_served = False

    async def open(self, replicas: int) -> None:
        await self._idempotency.open(replicas)
        await self.quotas.open()
        await self._broker.subscribe(subjects.ALL_PRESSURE, self._on_pressure)

    async def _on_pressure(self, msg: Msg) -> None:
        pressure = Pressure.unpack(msg.data)
        self._waits[pressure.model].hear(pressure, time.monotonic())
        self.has_served = self.has_served or pressure.workers > 0

    def workers(self, model: str) -> int:
        """How many workers serve a model, as far as its dispatcher has told."""
        return self._waits[model].workers if model in self._waits else 0

    async def submit(
        self, tenant: Tenant, submission: Submission, sink: Sink, key: str | None = None
    ) -> Ticket:
        """Accept a request, or attach to the one that the idempotency key stands for.

        Returns once the broker has stored it. Raises any `BadRequest` or `Refused`. When it is
        cancelled the request may have been accepted; it is then cancelled too.
        """
        (prepared,) = await self.preparation.prepare(tenant, submission)
        return await self.accept(prepared, sink, key)

    async def accept(self, prepared: Prepared, sink: Sink, key: str | None = None) -> Ticket:
        """As `submit`, of what has been prepared."""
        with self._relay.refusing():
            async with answered_within(ACCEPT_SECONDS):
                following = await self._accept(prepared, sink, key)
        spent = (time.monotonic() - prepared.began) * 1000
        return Ticket(following.request_id, prepared.model, following, spent)

    async def _accept(self, prepared: Prepared, sink: Sink, key: str | None) -> Following:
        following, first = await self._follow(prepared, sink, key)
        if not following.known:
            following.expires = time.monotonic() + prepared.seconds + _EXPIRY_SECONDS
            keyed = key is not None
            following = await self._publish(prepared, following, first=first, keyed=keyed)
        return following

    async def forward(
        self, tenant: Tenant, submission: Submission, key: str, route: str, shards: int
    ) -> None:
        """Accept a request whose replies go to a producer's own route.

        The first record of its log tells the producer which of its keys became which request. All
        of it may be repeated: the key stands for one request. Raises as `submit` does.
        """
        (prepared,) = await self.preparation.prepare(tenant, submission)
        made, scoped = secrets.token_hex(16), _SUBMITTED + key
        known = await self._idempotency.claim(tenant.name, scoped, made, submission.digest)
        if not known.first and await leaders.is_known(self._broker, tenant.name, known.request_id):
            return  # an earlier delivery was here: only its acknowledgement got lost
        token_log = TokenLog(self._broker, Log(tenant.name, route, known.request_id), shards)
        try:
            await token_log.append(messages.accepted(key, known.request_id))
        except Fenced:
            pass  # an earlier delivery of the same submission was here
        await self._queue(prepared, known.request_id, route, first=known.first)

    async def forwarded(self, tenant: str, key: str) -> str | None:
        """The id of the request that a producer's key has become, if any."""
        return await self._idempotency.find(tenant, _SUBMITTED + key)

    async def _follow(
        self, prepared: Prepared, sink: Sink, key: str | None
    ) -> tuple[Following, bool]:
        """A new request's following, or that of the request which `key` stands for; is it new?"""
        tenant, request_id = prepared.tenant.name, secrets.token_hex(16)
        if key is not None:
            digest = prepared.submission.digest
            known = await self._idempotency.claim(tenant, key, request_id, digest)
            if not known.first:
                return await self._relay.attach(tenant, known.request_id, sink), False
        return self._relay.expect(tenant, request_id, sink), True

    async def _publish(
        self, prepared: Prepared, following: Following, *, first: bool, keyed: bool
    ) -> Following:
        """Queue the request. Returns the following to use: another one if somebody was faster.

        Whether the broker has a request that it did not confirm is unknown. It is cancelled, with a
        key only when the grace period has passed: asked for again it is this very request.
        """
        sink, quotas = following.sink, self.quotas
        following.sink = quotas.noting(prepared.tenant, following.request_id, sink)
        unsure = self._relay.orphan if keyed else self._relay.give_up
        try:
            route = self._relay.route
            stored = await self._queue(prepared, following.request_id, route, first=first)
        except MillstreamError as error:
            if error.unsure:
                unsure(following)
            else:
                await self._relay.forget(following)
            raise
        except BaseException:
            unsure(following)
            raise
        if not stored.duplicate or following.last:  # replies come here: this was first after all
            following.known = True
            return following
        await self._relay.forget(following)  # the replies go to the route of who was first
        return await self._relay.attach(prepared.tenant.name, following.request_id, sink)

    async def _queue(
        self, prepared: Prepared, request_id: str, route: str, *, first: bool
    ) -> Stored:
        """Look at the wait, reserve its quotas and enter the lane; what stays out gives them back.

        Where that is not known it counts as open no more, and the rest of its reservation ends with
        the request, or expires. With `first` the id was made here: after a try without an answer a
        duplicate is of that try, which these quotas are for.
        """
        wait = self._waits[prepared.model.name].admit(prepared.wish, time.monotonic())
        expires = prepared.seconds + _EXPIRY_SECONDS
        hold = await self.quotas.reserve(prepared.tenant, request_id, prepared.amounts, expires)
        try:
            stored = await self._enter(prepared, request_id, route, wait)
        except BaseException as error:
            if hold:
                known = isinstance(error, MillstreamError) and not error.unsure
                (self.quotas.give_back if known else self.quotas.doubt)(hold)
            raise
        if hold and stored.duplicate and not (first and stored.repeated):
            self.quotas.give_back(hold)
        return stored

    async def _enter(
        self, prepared: Prepared, request_id: str, route: str, wait: float | None
    ) -> Stored:
        """Enter the lane; the broker recognises a request id that it has already."""
        account = self.quotas.account(request_id)
        now = self._broker.clock.now_ms()
        envelope = prepared.envelope(request_id, route, account, wait, now)
        headers = envelope.to_headers() | {MESSAGE_ID: request_id}
        payload, lane, limit = prepared.admitted.payload, prepared.lane, prepared.tenant.max_queued
        if limit >= self.max_queued:
            return await lanes.enter(self._broker, lane, payload, headers, ACCEPT_SECONDS)
        async with self._counting.setdefault(lane, asyncio.Lock()):
            return await lanes.enter_below(
                self._broker, lane, payload, headers, ACCEPT_SECONDS, limit
            )
