"""The way back: one subscription for all replies to this gateway, a table of who waits for what.

A reply is a stored record that the broker republished. Its `Nats-Last-Sequence` names the record
before it, so a lost reply is noticed at the next one and read back from the token log, and a lost
last one by the regular look at logs that are silent. A reader that is slow is paused and later fed
from the log: what waits for it in memory is bounded.

Several readers may follow one request, here and at other gateways. Each that leaves has its grace
period, and cancels the request after it unless somebody else is reading. While the gateway has to
refuse those who come back, grace periods begin anew.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from nats.aio.msg import Msg

from gateway.replies import request_lookup
from gateway.replies.catchup import Catchup
from gateway.replies.log_subscription import LogSubscription, Sink, discard_record, parse_sequences
from streams import messages, subjects, topology
from streams.broker.connection import Broker, BrokerSubscription
from streams.broker.retry import broker_timeout
from streams.errors import BrokerUnavailable, RequestNotFound
from streams.records.token_log import RETRY_TIMEOUT_SECONDS
from streams.subjects import LogAddress

log = structlog.get_logger()

CHECK_SECONDS = 0.25
RESUME_SECONDS = 2.5  # an unreachable broker is told to the client after this
READER_ANSWER_SECONDS = 1.0  # nobody waits for this one
LOST_SECONDS = RETRY_TIMEOUT_SECONDS  # so long may its writer try to put a lost log back
UNCONFIRMED_SECONDS = 60.0  # so long a request is cancelled that may have been stored
_YES = b"yes"
_OUR_FAULT = "the gateway failed; its log says why"


class Relay:
    """All requests that this gateway relays. `open` it, then `run` it."""

    def __init__(self, broker: Broker, route: str, shards: int, grace_seconds: float) -> None:
        self.route = route
        self._broker, self._shards, self._grace = broker, shards, grace_seconds
        self._own: dict[str, LogSubscription] = {}
        self._attached: dict[LogSubscription, BrokerSubscription] = {}
        self._pending_cancels: set[LogSubscription] = set()  # whose cancel may be due
        self._next_check_at = 0.0  # when to look at all of them again
        self._last_refusal_at = float("-inf")
        self._wake = asyncio.Event()
        self._catchup = Catchup(broker, shards, self._end_broken_sink, self.unsubscribe)

    def __len__(self) -> int:
        return len(self._own) + len(self._attached)

    @property
    def reader_count(self) -> int:
        """Followings that somebody waits for."""
        return sum(following.has_reader for following in self._list_subscriptions())

    async def open(self) -> None:
        """Subscribe; replies to what is published afterwards cannot be missed."""
        await self._broker.subscribe_raw(subjects.replies_to(self.route), self._on_reply)
        await self._broker.subscribe(subjects.ALL_READERS, self._on_reader_request)
        await self._broker.subscribe(subjects.ALL_FINDS, self._on_find_request)
        self._broker.on_reconnect.append(self._mark_all_suspect)

    def subscribe_new(self, tenant: str, request_id: str, sink: Sink) -> LogSubscription:
        """Follow a request that is about to be published on this gateway's route."""
        subject = subjects.log(LogAddress(tenant, self.route, request_id), self._shards)
        following = self._own[request_id] = self._new_subscription(
            tenant, request_id, subject, sink
        )
        following.subject = subject
        return following

    async def resume(
        self, tenant: str, request_id: str, sink: Sink, after: int = -1
    ) -> LogSubscription:
        """`attach`; raises `RequestNotFound` if nobody knows of such a request.

        Where somebody might know of it who cannot be asked it is `BrokerUnavailable`.
        """
        with self.recording_refusals():
            async with broker_timeout(RESUME_SECONDS):
                following = await self.subscribe_existing(tenant, request_id, sink, after)
            if following.is_durable:
                return following
            await self.unsubscribe(following)
            async with broker_timeout(RESUME_SECONDS):
                await request_lookup.ensure_unknown(self._broker, tenant, request_id)
        raise RequestNotFound(request_id)

    @contextmanager
    def recording_refusals(self) -> Iterator[None]:
        """Notes when what is inside is refused since the broker does not answer."""
        try:
            yield
        except BrokerUnavailable:
            self._last_refusal_at = time.monotonic()
            raise

    async def subscribe_existing(
        self, tenant: str, request_id: str, sink: Sink, after: int = -1
    ) -> LogSubscription:
        """Follow a request from behind token `after`, or some before, whichever gateway it came to.

        It is paused until `go_on`. Raises `BrokerUnavailable`.
        """
        subject = subjects.log_on_any_route(tenant, request_id, self._shards)
        following = self._new_subscription(tenant, request_id, subject, sink)
        following.is_paused, following.after_index, following.writer_subject = True, after, None
        following.is_durable = await self._is_known(following)

        def on_reply(subject: bytes, data: bytes, headers: bytes) -> None:
            self._deliver(following, data, headers)

        replies = subjects.reply_on_any_route(tenant, request_id)
        self._attached[following] = await self._broker.subscribe_raw(replies, on_reply)
        return following

    async def unsubscribe(self, following: LogSubscription) -> None:
        """Stop following; the request itself goes on. Idempotent."""
        following.sink = discard_record
        if self._own.get(following.request_id) is following:
            del self._own[following.request_id]
        if subscribed := self._attached.pop(following, None):
            await subscribed.unsubscribe()

    def cancel(self, following: LogSubscription) -> None:
        """Ask for the end of a request, again and again until it has come. Idempotent."""
        if following.cancel_at is None:
            following.cancel_at = 0.0
            self._pending_cancels.add(following)
            self._wake.set()

    def cancel_unconfirmed(self, following: LogSubscription) -> None:
        """Cancel a request of which it is not known whether the broker has it."""
        following.sink = discard_record
        following.expires_at = min(following.expires_at, time.monotonic() + UNCONFIRMED_SECONDS)
        self.cancel(following)

    def unpause(self, following: LogSubscription) -> None:
        """The sink has room again."""
        if following.is_paused:
            following.is_paused = False
            self._catchup.schedule(following)

    def orphan(self, following: LogSubscription) -> None:
        """Its reader is gone: it lives on for the grace period, then it is cancelled."""
        following.sink = discard_record
        self.unpause(following)
        if following.orphaned_until is None:
            following.orphaned_until = time.monotonic() + self._grace

    async def run(self) -> None:
        """Read back what was missed, repeat cancels, end grace periods; never ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._catchup.run(), name="backfill")
            while True:
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                try:
                    await self._check(time.monotonic(), tasks)
                except BrokerUnavailable as error:
                    log.warning("relay_interrupted", reason=str(error))
                    await asyncio.sleep(CHECK_SECONDS)

    async def close(self) -> None:
        """Tell the fleet of what nobody wants any more; the rest can be resumed elsewhere."""
        try:
            self._pending_cancels.update(self._list_subscriptions())
            await self._send_due_cancels(time.monotonic())
        except BrokerUnavailable as error:
            log.warning("cancels_not_sent", reason=str(error))

    def _list_subscriptions(self) -> list[LogSubscription]:
        return [*self._own.values(), *self._attached]

    def _new_subscription(
        self, tenant: str, request_id: str, subject: str, sink: Sink
    ) -> LogSubscription:
        stream = topology.token_stream_of(request_id, self._shards)
        now = time.monotonic()
        expires = now + topology.LOG_SECONDS
        return LogSubscription(
            tenant, request_id, stream, subject, sink, last_heard_at=now, expires_at=expires
        )

    def _on_reply(self, subject: bytes, data: bytes, headers: bytes) -> None:
        if following := self._own.get(subject[subject.rfind(b".") + 1 :].decode()):
            self._deliver(following, data, headers)

    def _deliver(self, following: LogSubscription, data: bytes, headers: bytes) -> None:
        following.last_heard_at = time.monotonic()
        try:
            if not following.receive_reply(*parse_sequences(headers), data):
                self._catchup.schedule(following)
        except Exception as error:
            self._end_broken_sink(following, error)
        if following.is_ended:
            self._finish(following)

    def _end_broken_sink(self, following: LogSubscription, error: Exception) -> None:
        """Its sink failed, which is our own fault: it ends, and nothing else does."""
        log.error("reply_sink_failed", request_id=following.request_id, exc_info=error)
        sink, following.sink = following.sink, discard_record
        following.is_ended = True
        try:
            sink(
                messages.error_record("internal_error", _OUR_FAULT, messages.openai_usage(0, 0)), 0
            )
        except Exception:
            log.exception("reply_sink_failed_again", request_id=following.request_id)

    def _finish(self, following: LogSubscription) -> None:
        """Let `run` forget it; the common case, our own requests, at once."""
        following.is_ended, following.sink = (
            True,
            discard_record,
        )  # a call and its following hold each other
        if self._own.get(following.request_id) is following:
            del self._own[following.request_id]
        if following in self._attached:
            self._catchup.schedule(following)

    def _mark_all_suspect(self) -> None:
        """The broker may have restarted and lost its memory."""
        for following in self._list_subscriptions():
            following.is_suspect = True
            self._catchup.schedule(following)

    async def _check(self, now: float, tasks: asyncio.TaskGroup) -> None:
        if now >= self._next_check_at:
            self._next_check_at = now + CHECK_SECONDS
            self._check_all(now, tasks)
        await self._send_due_cancels(now)

    def _check_all(self, now: float, tasks: asyncio.TaskGroup) -> None:
        for following in self._list_subscriptions():
            if following.needs_check(now):
                following.mark_checked(now)
                self._catchup.schedule(following)
            if following.needs_cancel(now):
                self._pending_cancels.add(following)
            self._end_overdue(following, now, tasks)

    async def _send_due_cancels(self, now: float) -> None:
        while self._pending_cancels:
            following = self._pending_cancels.pop()
            if following.needs_cancel(now):
                subject = subjects.cancel(following.tenant, following.request_id)
                await self._broker.publish(subject)
                following.mark_cancel_sent(now)

    def _end_overdue(
        self, following: LogSubscription, now: float, tasks: asyncio.TaskGroup
    ) -> None:
        """What waited too long: for its end, for its log to come back, for another reader."""
        if now >= following.expires_at:
            following.fail("deadline_exceeded", "the deadline passed without a sign of the request")
            self._finish(following)
        elif following.needs_search(now):
            following.mark_searched(now)
            tasks.create_task(self._search_lost_log(following), name=f"seek-{following.request_id}")
        elif following.is_abandoned(now) and now < self._last_refusal_at + self._grace:
            following.orphaned_until = self._last_refusal_at + self._grace
        elif following.is_abandoned(now):
            following.orphaned_until = following.expires_at
            tasks.create_task(
                self._cancel_abandoned(following), name=f"abandon-{following.request_id}"
            )

    async def _search_lost_log(self, following: LogSubscription) -> None:
        """Ask who has the lost log, or will write it. If nobody does for long that is the end."""
        tenant, request_id = following.tenant, following.request_id
        if await request_lookup.is_request_known(self._broker, tenant, request_id):
            following.lost_at = time.monotonic()
        elif following.is_lost(time.monotonic(), LOST_SECONDS):
            try:
                await request_lookup.ensure_unknown(self._broker, tenant, request_id)
            except BrokerUnavailable as error:
                log.warning("lost_log_search_failed", request_id=request_id, reason=str(error))
            else:
                following.fail("log_lost", "the broker has lost this request's output")
                self._finish(following)

    async def _cancel_abandoned(self, following: LogSubscription) -> None:
        """The grace period is over: cancel the request, unless somebody else reads it."""
        reader = subjects.reader(following.tenant, following.request_id)
        if await self._broker.request(reader, b"", READER_ANSWER_SECONDS) is not None:
            self._finish(following)
        elif self._broker.is_connected:
            self.cancel(following)
        else:  # nobody could be asked
            following.orphaned_until = time.monotonic() + CHECK_SECONDS

    async def _is_known(self, following: LogSubscription) -> bool:
        """True if the request has a log, or somebody knows that it waits for one."""
        if await self._catchup.find_log(following) is not None:
            return True
        return await request_lookup.is_request_known(
            self._broker, following.tenant, following.request_id
        )

    async def _on_find_request(self, msg: Msg) -> None:
        if any(
            following.is_durable and not following.lost_at
            for following in self._matching_subscriptions(msg)
        ):
            await self._broker.publish(msg.reply, _YES)

    async def _on_reader_request(self, msg: Msg) -> None:
        if any(following.has_reader for following in self._matching_subscriptions(msg)):
            await self._broker.publish(msg.reply, _YES)

    def _matching_subscriptions(self, msg: Msg) -> list[LogSubscription]:
        """The followings here of the request that a question is about."""
        asked = subjects.parse_request_id(msg.subject)
        found = [self._own.get(asked[1]), *self._attached]
        return [f for f in found if f and (f.tenant, f.request_id) == asked]
