"""The way in: from a submission to a durable request."""

import asyncio
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass

import structlog
from nats.aio.msg import Msg

from gateway.admission import Admitted, Deadlines, admit, check_tools
from gateway.checks import Amounts
from gateway.following import Following, Sink
from gateway.grammars import Grammars
from gateway.idempotency import Idempotency
from gateway.quotas import Quotas
from gateway.relay import Relay
from gateway.submission import Submission
from gateway.tokenizer import Tokenizers, check_tokens
from gateway.waits import Waits, Wish, goal_seconds
from registry.models import Model, Version
from registry.store import Registry
from registry.tenants import Tenant
from streams import lanes, messages, subjects
from streams.connection import Broker, Stored
from streams.errors import MillstreamError, PayloadTooLarge
from streams.headers import MESSAGE_ID, Envelope
from streams.messages import Pressure
from streams.patience import answered_within
from streams.subjects import Lane, Log
from streams.token_log import Fenced, TokenLog

log = structlog.get_logger()

ACCEPT_SECONDS = 2.5  # an unreachable broker is a 503 after this
_OVERHEAD_BYTES = 4096  # of max_payload, for headers
_SUBMITTED = "submitted\n"  # keeps producers' keys apart from those in headers and frames
_EXPIRY_SECONDS = 15.0  # by so long after its deadline a request has ended or never was


@dataclass(frozen=True)
class Ticket:
    """An accepted request that is followed here: it will end in exactly one terminal."""

    request_id: str
    model: Model
    following: Following
    admit_ms: float  # from the submission to the broker's confirmation


@dataclass(frozen=True)
class Prepared:
    """A submission that was found good, ready to be queued."""

    tenant: Tenant
    submission: Submission
    model: Model
    lane: Lane
    pin: str
    admitted: Admitted
    seconds: float
    began: float  # when it came, by the monotonic clock
    adapter: str  # empty without one

    @property
    def amounts(self) -> Amounts:
        """What its quotas must have room for."""
        prompt = self.admitted.prompt_tokens
        return Amounts(prompt, self.admitted.cost - prompt, self.model.price)

    @property
    def wish(self) -> Wish:
        """What decides whether it can be in time."""
        return Wish(
            self.tenant.name,
            self.submission.priority,
            self.admitted.prompt_tokens,
            self.admitted.cost,
            self.seconds,
            goal_seconds(self.model.goals, self.submission.priority),
        )

    def envelope(
        self, request_id: str, route: str, account: str, wait: float | None, now: int
    ) -> Envelope:
        """Its headers, at `now` (epoch ms).

        `wait` is in seconds, as estimated, None where nothing is known of it.
        """
        return Envelope(
            request_id=request_id,
            tenant=self.tenant.name,
            route=route,
            cost=self.admitted.cost,
            prompt_tokens=self.admitted.prompt_tokens,
            deadline=now + int(self.seconds * 1000),
            accepted=now,
            version=self.pin,
            adapter=self.adapter,
            account=account,
            told_wait=None if wait is None else round(wait * 1000),
            marks=self.admitted.marks,
        )


class Intake:
    """Accepts requests for this gateway."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        tokenizers: Tokenizers,
        grammars: Grammars,
        relay: Relay,
        deadlines: Deadlines,
    ) -> None:
        self._broker, self._registry = broker, registry
        self._tokenizers, self._grammars = tokenizers, grammars
        self._relay, self._deadlines = relay, deadlines
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
        (prepared,) = await self.prepare(tenant, submission)
        return await self.accept(prepared, sink, key)

    async def accept(self, prepared: Prepared, sink: Sink, key: str | None = None) -> Ticket:
        """The second half of `submit`."""
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
        (prepared,) = await self.prepare(tenant, submission)
        made, scoped = secrets.token_hex(16), _SUBMITTED + key
        known = await self._idempotency.claim(tenant.name, scoped, made, submission.digest)
        if not known.first and await self._relay.is_known(tenant.name, known.request_id):
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

    async def prepare(self, tenant: Tenant, submission: Submission) -> list[Prepared]:
        """The first half of `submit`: what is to be accepted, once for each choice wanted."""
        began = time.monotonic()
        model, version, adapter = self._registry.target(submission.model)
        seconds = self._deadlines.seconds(submission)
        check_tools(submission, model)
        await self._check_sampling(model, submission)
        if submission.query is None:
            encoded, splits = await self._encode(model, version, submission), list[int]()
        else:
            encoded, splits = await self._encode_pairs(model, version, submission)
        choices = submission.each()
        reference = adapter.reference if adapter else None
        admitted = [admit(each, model, tenant, encoded, splits, reference) for each in choices]
        _check_size(admitted[0], self._broker.max_payload - _OVERHEAD_BYTES)
        lane = Lane(tenant.name, model.name, submission.priority)
        pin = _pin(submission.model, model, version)
        name = adapter.name if adapter else ""
        return [
            Prepared(tenant, choice, model, lane, pin, each, seconds, began, name)
            for choice, each in zip(choices, admitted, strict=True)
        ]

    async def _check_sampling(self, model: Model, submission: Submission) -> None:
        """Raises `TokenOutOfRange` for a wrong bias, `BadGrammar` for a wrong grammar."""
        sampling = submission.sampling
        if sampling.logit_bias:
            check_tokens(model, [token for token, _ in sampling.logit_bias], "logit_bias")
        if sampling.grammar:
            await self._grammars.check(sampling.grammar, submission.grammar_field)

    async def _encode(
        self, model: Model, version: Version, submission: Submission
    ) -> list[list[int]]:
        """The prompt, or each input, as token ids; ids that the client gave are checked."""
        if submission.chat is not None:
            chat, tools = submission.chat, submission.tools
            return [await self._tokenizers.encode_chat(model, version, chat, tools)]
        given = submission.inputs if submission.prompt is None else [submission.prompt]
        texts = [each for each in given if isinstance(each, str)]
        ids = [each for each in given if not isinstance(each, str)]
        for tokens in ids:
            check_tokens(model, tokens, "prompt" if submission.kind == "generate" else "input")
        return ids or await self._tokenizers.encode_all(model, version, texts)

    async def _encode_pairs(
        self, model: Model, version: Version, submission: Submission
    ) -> tuple[list[list[int]], list[int]]:
        """The query with each input, as token ids, and where in each the input begins."""
        texts = [each for each in submission.inputs if isinstance(each, str)]
        assert submission.query is not None
        pairs = await self._tokenizers.encode_pairs(model, version, submission.query, texts)
        return [pair.tokens for pair in pairs], [pair.split for pair in pairs]

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


def _check_size(admitted: Admitted, limit: int) -> None:
    if len(admitted.payload) > limit:
        raise PayloadTooLarge(len(admitted.payload), limit)


def _pin(name: str, model: Model, version: Version) -> str:
    """The version that a request must be served by; empty for whatever is the default then."""
    return version.id if "@" in name or version.id != model.default_version else ""
