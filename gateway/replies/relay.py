"""Relay: one NATS subscription for all replies to this gateway, and its table of log subscriptions.

A reply is a stored record that the broker republished. Its `Nats-Last-Sequence` names the record
before it, so a lost reply is noticed at the next one and read back from the token log; a lost last
one is noticed by the regular check of silent logs. A slow reader is paused and later fed from the
log, so what waits for it in memory is bounded.

Several readers may read one request, here and at other gateways. Each that leaves starts a grace
period, after which the request is cancelled unless somebody else is reading. While the gateway
refuses clients that come back, since the broker does not answer, grace periods are extended.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from nats.aio.msg import Msg

from gateway.replies import request_lookup
from gateway.replies.catchup import Catchup
from gateway.replies.log_cursor import LogCursor
from gateway.replies.log_subscription import (
    DeliveryState,
    LogSource,
    LogSubscription,
    Sink,
    discard_record,
    parse_sequences,
)
from gateway.replies.subscription_deadlines import SubscriptionDeadlines
from streams import messages, subjects, topology
from streams.broker.broker_client import Broker, BrokerSubscription, StoreRefused
from streams.broker.retry import broker_timeout
from streams.errors import BrokerUnavailable, MillstreamError, RequestNotFound
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.subjects import LogAddress

log = structlog.get_logger()

CHECK_SECONDS = 0.25
RESUME_SECONDS = 2.5  # an unreachable broker is a 503 after this
READER_ANSWER_SECONDS = 1.0  # ample, since no client waits for this answer
LOST_SECONDS = RETRY_TIMEOUT_SECONDS  # for so long its writer may try to put a lost log back
UNCONFIRMED_SECONDS = 60.0  # for so long cancels are repeated for a request that may be stored
_YES = b"yes"
_INTERNAL_ERROR = "the gateway failed; its log says why"


class Relay:
    """Passes the records of requests to their readers at this gateway.

    One instance serves a gateway. Call `open` before the first subscription, and keep `run`
    running. `route` is the part of reply subjects that names this gateway. `grace_seconds` is how
    long a request lives on after its reader has left.
    """

    def __init__(self, broker: Broker, route: str, shards: int, grace_seconds: float) -> None:
        self.route = route
        self._broker, self._shards, self._grace = broker, shards, grace_seconds
        self._own: dict[str, LogSubscription] = {}
        self._attached: dict[LogSubscription, BrokerSubscription] = {}
        self._pending_cancels: set[LogSubscription] = set()  # a cancel of these may be due
        self._next_check_at = 0.0  # when to check all subscriptions again
        self._last_refusal_at = float("-inf")
        self._wake = asyncio.Event()
        self._catchup = Catchup(broker, shards, self._end_broken_sink, self.unsubscribe)

    def __len__(self) -> int:
        """Return the number of log subscriptions, with and without a reader."""
        return len(self._own) + len(self._attached)

    @property
    def reader_count(self) -> int:
        """The number of log subscriptions whose request runs on and whose reader is here."""
        return sum(subscription.has_reader for subscription in self._list_subscriptions())

    async def open(self) -> None:
        """Subscribe to the replies for this gateway's route and to other gateways' questions.

        Once this returns, no reply to a request that is queued later can be missed. Raises
        `BrokerUnavailable`.
        """
        await self._broker.subscribe_raw(subjects.replies_to(self.route), self._on_reply)
        await self._broker.subscribe(subjects.ALL_READERS, self._on_reader_request)
        await self._broker.subscribe(subjects.ALL_FINDS, self._on_find_request)
        self._broker.on_reconnect.append(self._mark_all_stale)

    def subscribe_new(self, tenant: str, request_id: str, sink: Sink) -> LogSubscription:
        """Subscribe `sink` to a request that is about to be queued with this gateway's route.

        Call it before the request is published, so that no reply is missed. `sink` gets each record
        and its size in bytes, and returns False when it is full; then nothing comes until
        `unpause`.
        """
        subject = subjects.log(LogAddress(tenant, self.route, request_id), self._shards)
        subscription = self._new_subscription(tenant, request_id, subject, sink)
        subscription.source.subject = subject
        self._own[request_id] = subscription
        return subscription

    async def resume(
        self, tenant: str, request_id: str, sink: Sink, cursor: LogCursor | None = None
    ) -> LogSubscription:
        """Subscribe to a request as `subscribe_existing` does, but raise if nobody knows of it.

        Raises `RequestNotFound` if it is certain that nobody does, and `BrokerUnavailable` if the
        broker, or somebody who might know of the request, does not answer. Each of the two steps,
        to subscribe and to make certain, may take `RESUME_SECONDS`.
        """
        with self.recording_refusals():
            async with broker_timeout(RESUME_SECONDS):
                subscription = await self.subscribe_existing(tenant, request_id, sink, cursor)
            if subscription.is_durable:
                return subscription
            await self.unsubscribe(subscription)
            async with broker_timeout(RESUME_SECONDS):
                await request_lookup.ensure_unknown(self._broker, tenant, request_id)
        raise RequestNotFound(request_id)

    @contextmanager
    def recording_refusals(self) -> Iterator[None]:
        """Record the time when the `with` block raises `BrokerUnavailable`; the error goes on.

        Grace periods are extended after such a time, because clients could not come back to their
        requests meanwhile.
        """
        try:
            yield
        except BrokerUnavailable:
            self._last_refusal_at = time.monotonic()
            raise

    async def subscribe_existing(
        self, tenant: str, request_id: str, sink: Sink, cursor: LogCursor | None = None
    ) -> LogSubscription:
        """Subscribe to a request that came through any gateway, from the reader's position on.

        That is `cursor`, by default the begin of the output. If it has the number of characters
        that the reader has had, the output goes on exactly there; without, some tokens that it has
        had, and text behind the last one, may be passed on again. The result is paused: the sink
        gets nothing until `unpause`. Its `is_durable` is True if the request has a log or somebody
        answers for it. Raises `BrokerUnavailable`.
        """
        subject = subjects.log_on_any_route(tenant, request_id, self._shards)
        subscription = self._new_subscription(tenant, request_id, subject, sink)
        subscription.state, subscription.source.writer_subject = DeliveryState.PAUSED, None
        subscription.cursor = cursor or subscription.cursor
        subscription.is_durable = await self._is_known(subscription)

        def on_reply(subject: bytes, data: bytes, headers: bytes) -> None:
            self._deliver(subscription, data, headers)

        replies = subjects.reply_on_any_route(tenant, request_id)
        self._attached[subscription] = await self._broker.subscribe_raw(replies, on_reply)
        return subscription

    async def unsubscribe(self, subscription: LogSubscription) -> None:
        """Stop passing records to the subscription's sink; the request runs on. Idempotent."""
        subscription.sink = discard_record
        if self._own.get(subscription.request_id) is subscription:
            del self._own[subscription.request_id]
        if broker_subscription := self._attached.pop(subscription, None):
            await broker_subscription.unsubscribe()

    def doubt_unstarted(self) -> None:
        """Have `run` ask who knows of each request that has no record yet.

        Called when a stream that holds queued requests was lost. Those that nobody knows of end
        with an error.
        """
        for subscription in self._list_subscriptions():
            subscription.doubt(time.monotonic())

    def fail_stream(self, stream: str) -> None:
        """End every request whose log is in `stream`, with the error `broker_unavailable`.

        Called when the broker refuses to make that stream usable.
        """
        for subscription in self._list_subscriptions():
            if subscription.source.stream == stream:
                subscription.fail(
                    "broker_unavailable", "the message broker refuses the stream of this request"
                )
                self._finish(subscription)

    def cancel(self, subscription: LogSubscription) -> None:
        """Begin to cancel a request, and return at once. Idempotent.

        Cancel messages are sent by `run`, again and again until the request has ended. The sink
        gets the request's last record as usual.
        """
        if subscription.deadlines.cancel_at is None:
            subscription.deadlines.cancel_at = 0.0
            self._pending_cancels.add(subscription)
            self._wake.set()

    def cancel_unconfirmed(self, subscription: LogSubscription) -> None:
        """Begin to cancel a request of which it is unknown whether the broker has stored it.

        Returns at once. Cancel messages are repeated for `UNCONFIRMED_SECONDS`; the sink gets no
        more records.
        """
        subscription.sink, deadlines = discard_record, subscription.deadlines
        deadlines.expires_at = min(deadlines.expires_at, time.monotonic() + UNCONFIRMED_SECONDS)
        self.cancel(subscription)

    def unpause(self, subscription: LogSubscription) -> None:
        """Resume passing records to a sink that was full and can take more. Idempotent.

        Returns at once; what the sink missed is read from the log by `run`.
        """
        if subscription.unpause():
            self._catchup.schedule(subscription)

    def orphan(self, subscription: LogSubscription, sink: Sink = discard_record) -> None:
        """Note that the reader is gone: after the grace period the request is cancelled.

        `sink` takes the rest of the records. Idempotent. A reader that resumes the request
        meanwhile has a subscription of its own.
        """
        subscription.sink = sink
        self.unpause(subscription)
        if subscription.deadlines.orphaned_until is None:
            subscription.deadlines.orphaned_until = time.monotonic() + self._grace

    async def run(self) -> None:
        """Read missed records, send cancels, and end grace periods, until cancelled.

        While the broker does not answer, this goes on trying and raises nothing.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._catchup.run(), name="catchup")
            while True:
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                self._check(time.monotonic(), tasks)

    async def close(self) -> None:
        """Send each cancel once more, at the gateway's end; a failure is only logged.

        All other requests run on, and can be resumed at another gateway.
        """
        self._pending_cancels.update(self._list_subscriptions())
        await self._send_cancels(self._pop_due_cancels(math.inf))

    def _list_subscriptions(self) -> list[LogSubscription]:
        return [*self._own.values(), *self._attached]

    def _new_subscription(
        self, tenant: str, request_id: str, subject: str, sink: Sink
    ) -> LogSubscription:
        stream, now = topology.token_stream_of(request_id, self._shards), time.monotonic()
        deadlines = SubscriptionDeadlines(now, expires_at=now + topology.LOG_SECONDS)
        return LogSubscription(LogSource(tenant, request_id, stream, subject), sink, deadlines)

    def _on_reply(self, subject: bytes, data: bytes, headers: bytes) -> None:
        if subscription := self._own.get(subject[subject.rfind(b".") + 1 :].decode()):
            self._deliver(subscription, data, headers)

    def _deliver(self, subscription: LogSubscription, data: bytes, headers: bytes) -> None:
        subscription.deadlines.last_heard_at = time.monotonic()
        try:
            if not subscription.receive_reply(*parse_sequences(headers), data):
                self._catchup.schedule(subscription)
        except Exception as error:
            self._end_broken_sink(subscription, error)
        if subscription.is_ended:
            self._finish(subscription)

    def _end_broken_sink(self, subscription: LogSubscription, error: Exception) -> None:
        """End the one subscription whose sink raised an error, which is our own fault."""
        log.error("reply_sink_failed", request_id=subscription.request_id, exc_info=error)
        sink = subscription.sink
        subscription.end()
        try:
            sink(
                messages.error_record(
                    "internal_error", _INTERNAL_ERROR, messages.openai_usage(0, 0)
                ),
                0,
            )
        except Exception:
            log.exception("reply_sink_failed_again", request_id=subscription.request_id)

    def _finish(self, subscription: LogSubscription) -> None:
        """Remove an ended subscription: our own at once, an attached one in `run`."""
        subscription.end()
        if self._own.get(subscription.request_id) is subscription:
            del self._own[subscription.request_id]
        if subscription in self._attached:
            self._catchup.schedule(subscription)

    def _mark_all_stale(self) -> None:
        """Read all logs again after a reconnect: a broker that restarted has lost its memory."""
        for subscription in self._list_subscriptions():
            subscription.mark_stale()
            self._catchup.schedule(subscription)

    def _check(self, now: float, tasks: asyncio.TaskGroup) -> None:
        if now >= self._next_check_at:
            self._next_check_at = now + CHECK_SECONDS
            self._check_all(now, tasks)
        if due := self._pop_due_cancels(now):
            tasks.create_task(self._send_cancels(due), name="cancels")

    def _check_all(self, now: float, tasks: asyncio.TaskGroup) -> None:
        for subscription in self._list_subscriptions():
            if subscription.deadlines.needs_check(now):
                subscription.deadlines.mark_checked(now)
                self._catchup.schedule(subscription)
            if subscription.needs_cancel(now):
                self._pending_cancels.add(subscription)
            self._end_overdue(subscription, now, tasks)

    def _pop_due_cancels(self, now: float) -> list[LogSubscription]:
        """Return the subscriptions whose cancel is due, and note that it is sent."""
        due = [each for each in self._pending_cancels if each.needs_cancel(now)]
        self._pending_cancels.clear()
        for subscription in due:
            subscription.deadlines.mark_cancel_sent(now)
        return due

    async def _send_cancels(self, due: list[LogSubscription]) -> None:
        """Send cancels, all at once; failures are only logged, since cancels are repeated."""
        errors = await asyncio.gather(*(self._try_to_cancel(each) for each in due))
        if failures := [error for error in errors if error]:
            log.warning("cancels_not_sent", count=len(failures), reason=str(failures[0]))

    async def _try_to_cancel(self, subscription: LogSubscription) -> MillstreamError | None:
        source = subscription.source
        try:
            await self._broker.store(subjects.cancel(source.tenant, source.request_id), b"")
        except (BrokerUnavailable, StoreRefused) as error:
            subscription.deadlines.mark_cancel_failed(time.monotonic())
            return error
        return None

    def _end_overdue(
        self, subscription: LogSubscription, now: float, tasks: asyncio.TaskGroup
    ) -> None:
        """End what waited too long: for its terminal, for its lost log, or for another reader."""
        deadlines = subscription.deadlines
        if now >= deadlines.expires_at:
            subscription.fail(
                "deadline_exceeded", "the deadline passed without a sign of the request"
            )
            self._finish(subscription)
        elif deadlines.needs_search(now):
            deadlines.mark_searched(now)
            tasks.create_task(
                self._search_lost_log(subscription), name=f"seek-{subscription.request_id}"
            )
        elif deadlines.is_abandoned(now) and now < self._last_refusal_at + self._grace:
            deadlines.orphaned_until = self._last_refusal_at + self._grace
        elif deadlines.is_abandoned(now):
            deadlines.orphaned_until = deadlines.expires_at
            tasks.create_task(
                self._cancel_abandoned(subscription), name=f"abandon-{subscription.request_id}"
            )

    async def _search_lost_log(self, subscription: LogSubscription) -> None:
        """Ask who has the lost log or will write it; end the request if for long nobody does."""
        tenant, request_id = subscription.source.tenant, subscription.request_id
        if await request_lookup.is_request_known(self._broker, tenant, request_id):
            subscription.deadlines.mark_writer_found(time.monotonic())
        elif subscription.deadlines.is_lost(time.monotonic(), LOST_SECONDS):
            try:
                await request_lookup.ensure_unknown(self._broker, tenant, request_id)
            except BrokerUnavailable as error:
                log.warning("lost_log_search_failed", request_id=request_id, reason=str(error))
            else:
                subscription.fail("log_lost", "the broker has lost this request's output")
                self._finish(subscription)

    async def _cancel_abandoned(self, subscription: LogSubscription) -> None:
        """Cancel a request whose grace period is over, unless somebody else reads it."""
        reader = subjects.reader(subscription.source.tenant, subscription.request_id)
        if await self._broker.request(reader, b"", READER_ANSWER_SECONDS) is not None:
            self._finish(subscription)
        elif self._broker.is_connected:
            self.cancel(subscription)
        else:  # other gateways could not be asked
            subscription.deadlines.orphaned_until = time.monotonic() + CHECK_SECONDS

    async def _is_known(self, subscription: LogSubscription) -> bool:
        """True if the request has a log, or somebody answers that it will have one."""
        source = subscription.source
        if await self._catchup.find_log(source) is not None:
            return True
        return await request_lookup.is_request_known(self._broker, source.tenant, source.request_id)

    async def _on_find_request(self, msg: Msg) -> None:
        if any(
            subscription.is_durable and subscription.deadlines.lost_at is None
            for subscription in self._matching_subscriptions(msg)
        ):
            await self._broker.publish(msg.reply, _YES)

    async def _on_reader_request(self, msg: Msg) -> None:
        if any(subscription.has_reader for subscription in self._matching_subscriptions(msg)):
            await self._broker.publish(msg.reply, _YES)

    def _matching_subscriptions(self, msg: Msg) -> list[LogSubscription]:
        """The subscriptions here to the request that a message asks for."""
        wanted = subjects.parse_request_id(msg.subject)
        found = [self._own.get(wanted[1]), *self._attached]
        return [each for each in found if each and (each.source.tenant, each.request_id) == wanted]
