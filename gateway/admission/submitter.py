"""Submitter: the one way in. Queues a validated request, whichever entry point it came by."""

import asyncio
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum, auto

import structlog
from nats.aio.msg import Msg

from api.submission.ledger_space import LedgerSpace
from api.submission.open_reservations import Reservation
from api.submission.quotas import Quotas
from api.submission.validation import ValidatedRequest
from gateway.admission.fleet_view import FleetView
from gateway.admission.idempotency import IdempotencyRecord, IdempotencyStore
from gateway.admission.load_shedding import (
    LatencyTarget,
    LoadShedder,
    first_token_goal_seconds,
)
from gateway.admission.offload_thread import OffloadThread
from streams import subjects
from streams.broker.broker_client import Broker, PubAck
from streams.broker.stream_monitor import StreamMonitor
from streams.coordination.pressure_reports import InvalidPressure, parse_pressure
from streams.errors import MillstreamError, Overloaded
from streams.headers import MESSAGE_ID, AnswerRef
from streams.messages import Encoding
from streams.records import request_queue
from streams.subjects import Lane

log = structlog.get_logger()

ACCEPT_SECONDS = 2.5  # an unreachable broker is a 503 after this
EXPIRY_MARGIN_SECONDS = 15.0  # so long after its deadline a request has ended or was never stored
_UNUSABLE = "the message broker refuses a stream that requests need; an operator must look at it"
_UNUSABLE_RETRY_SECONDS = 10.0


@dataclass(frozen=True)
class RequestClaim:
    """The id under which a submission is queued, and the idempotency key that stands for it.

    `is_first` is False if an earlier call has bound the id to the key, so that the request may be
    queued already.
    """

    request_id: str
    key: str | None = None
    is_first: bool = True


@dataclass(frozen=True)
class ReplyForm:
    """The form of a request's replies: their encoding, and the durable answer, if one is wanted."""

    encoding: Encoding = "msgpack"
    answer: AnswerRef | None = None


_PLAIN_REPLIES = ReplyForm()


class SubmitOutcome(Enum):
    """The origin of the message that the broker has stored for a request."""

    STORED = auto()  # that of this call
    REPEATED = auto()  # one of two tries of this call, or that of another call in between
    EXISTING = auto()  # that of another call under the same idempotency key


class Submitter:
    """Queues validated requests, for this gateway: sheds load, reserves quotas, and publishes.

    Call `open` before the first request.
    """

    def __init__(
        self,
        broker: Broker,
        streams: StreamMonitor,
        offload_thread: OffloadThread,
        ledger_space: LedgerSpace,
        fleet: FleetView,
    ) -> None:
        self._broker, self._streams, self._fleet = broker, streams, fleet
        self._ledger_space = ledger_space
        self._offload_thread = offload_thread
        self._idempotency = IdempotencyStore(broker)
        self.quotas = Quotas(broker)
        self._load_shedders: dict[str, LoadShedder] = defaultdict(LoadShedder)
        self._lane_locks: dict[Lane, asyncio.Lock] = {}
        self.has_had_workers = False

    async def open(self) -> None:
        """Subscribe to the ledger and to load reports; raises `BrokerUnavailable`."""
        await self.quotas.open()
        await self._broker.subscribe(subjects.ALL_PRESSURE, self._on_pressure)

    async def _on_pressure(self, msg: Msg) -> None:
        try:
            pressure = parse_pressure(msg.subject, msg.headers or {}, msg.data)
        except InvalidPressure as error:
            log.warning("pressure_ignored", subject=msg.subject, reason=str(error))
            return
        self._load_shedders[pressure.model].update(pressure, time.monotonic())
        if pressure.workers:
            self._fleet.note_awake(pressure.model)
        self.has_had_workers = self.has_had_workers or pressure.workers > 0

    def worker_count(self, model: str) -> int:
        """Return how many workers serve a model, by its dispatcher's last report; 0 without one."""
        return self._load_shedders[model].worker_count if model in self._load_shedders else 0

    def has_no_worker(self, model: str) -> bool:
        """Return True if a model's dispatcher has said that no worker serves it."""
        return model in self._load_shedders and self._load_shedders[model].has_no_worker

    async def compute_digest(self, validated: ValidatedRequest) -> str:
        """Return the digest of a request's submission; waits for a thread if the request is large.

        That may take seconds while many large bodies are parsed, so no deadline of the broker's may
        run meanwhile.
        """
        size, submission = len(validated.packed.payload), validated.submission
        return await self._offload_thread.run(size, lambda: submission.digest)

    async def claim(self, tenant: str, key: str | None, digest: str) -> RequestClaim:
        """Return the request id to submit under: a new one, or the one that `key` stands for.

        Without a key the id is always new. `digest` is that of the submission. Raises
        `IdempotencyConflict` if the key was used with another digest, and `BrokerUnavailable`.
        """
        request_id = secrets.token_hex(16)
        if key is None:
            return RequestClaim(request_id)
        record = await self._idempotency.claim(tenant, key, request_id, digest)
        return RequestClaim(record.request_id, key, record.is_first)

    async def claim_anew(
        self, tenant: str, key: str, used: IdempotencyRecord, digest: str
    ) -> RequestClaim:
        """Return a new request id, for which a used key stands from now on. Raises as `claim`."""
        request_id = secrets.token_hex(16)
        record = await self._idempotency.rebind(tenant, key, used, request_id, digest)
        return RequestClaim(record.request_id, key, record.is_first)

    async def find_key(self, tenant: str, key: str) -> IdempotencyRecord | None:
        """Return what an idempotency key stands for; None if it is unused.

        Raises `BrokerUnavailable`.
        """
        return await self._idempotency.find(tenant, key)

    async def submit(
        self,
        validated: ValidatedRequest,
        claim: RequestClaim,
        route: str,
        form: ReplyForm = _PLAIN_REPLIES,
    ) -> SubmitOutcome:
        """Queue a request under its claimed id; return once the broker has stored it.

        The replies go to `route`, in their form. Raises the `Refused` that says why the request is
        not accepted: all are refused while a stream is unusable, since an accepted one might never
        end. After a `BrokerUnavailable` or a cancellation the request may have been stored. A
        request that stays out gives its reserved quotas back; one of which it is unknown no longer
        counts as open, and the rest of its reservation ends with it, or expires.
        """
        if self._streams.unusable:
            raise Overloaded(_UNUSABLE, _UNUSABLE_RETRY_SECONDS)
        self._ledger_space.check()
        model = validated.model.name
        wait = self._load_shedders[model].admit(
            _latency_target(validated), time.monotonic(), self._fleet.seconds_to_worker(model)
        )
        expiry_seconds = validated.deadline_seconds + EXPIRY_MARGIN_SECONDS
        reservation = await self.quotas.reserve(
            validated.tenant,
            validated.model.name,
            claim.request_id,
            validated.amounts,
            expiry_seconds,
        )
        try:
            stored = await self._enqueue(
                validated, claim.request_id, route, wait, reservation, form
            )
        except BaseException as error:
            if reservation:
                is_out = isinstance(error, MillstreamError) and not error.may_have_succeeded
                (self.quotas.release if is_out else self.quotas.release_unconfirmed)(reservation)
            raise
        outcome = _outcome(claim, stored)
        if reservation:
            is_other = outcome is SubmitOutcome.EXISTING
            (self.quotas.release if is_other else self.quotas.confirm)(reservation)
        return outcome

    async def _enqueue(
        self,
        validated: ValidatedRequest,
        request_id: str,
        route: str,
        wait: float | None,
        reservation: Reservation | None,
        form: ReplyForm,
    ) -> PubAck:
        """Publish the request to its lane; the broker recognises a request id that it has already.

        A tenant's limit below the stream's own is checked here, one request of the lane at a time.
        """
        clock, counted = self._broker.clock, reservation or self.quotas.find(request_id)
        envelope = replace(
            validated.build_envelope(request_id, route, counted, wait, clock.now_ms()),
            encoding=form.encoding,
            answer=form.answer,
        )
        headers = envelope.to_headers() | {MESSAGE_ID: request_id}
        payload, lane, limit = validated.packed.payload, validated.lane, validated.tenant.max_queued
        if limit >= self._streams.lane_limit:
            _check_in_time(reservation, clock.now())
            return await request_queue.enqueue(self._broker, lane, payload, headers, ACCEPT_SECONDS)
        async with self._lane_locks.setdefault(lane, asyncio.Lock()):
            _check_in_time(reservation, clock.now())
            return await request_queue.enqueue_below(
                self._broker, lane, payload, headers, ACCEPT_SECONDS, limit
            )


def _check_in_time(reservation: Reservation | None, now: float) -> None:
    """Raise `Overloaded` if this process stood still for so long that its reservation is over."""
    if reservation and now >= reservation.expires_at:
        raise Overloaded("this gateway stood still until the request's deadline was over")


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


def _outcome(claim: RequestClaim, stored: PubAck) -> SubmitOutcome:
    """A duplicate of an id that was made here may be of this very call, if it tried twice."""
    if not stored.duplicate:
        return SubmitOutcome.STORED
    is_own = claim.is_first and stored.repeated
    return SubmitOutcome.REPEATED if is_own else SubmitOutcome.EXISTING
