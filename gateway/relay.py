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

from gateway import leaders
from gateway.backfill import Backfill
from gateway.following import Following, Sink, discard, sequences
from streams import messages, subjects, topology
from streams.connection import Broker, Subscribed
from streams.errors import BrokerUnavailable, RequestNotFound
from streams.patience import answered_within
from streams.subjects import Log
from streams.token_log import PATIENCE_SECONDS

log = structlog.get_logger()

LOOK_SECONDS = 0.25
RESUME_SECONDS = 2.5  # an unreachable broker is told to the client after this
READER_SECONDS = 1.0  # nobody waits for this one
LOST_SECONDS = PATIENCE_SECONDS  # so long may its writer try to put a lost log back
UNSURE_SECONDS = 60.0  # so long a request is cancelled that may have been stored
_YES = b"yes"
_OUR_FAULT = "the gateway failed; its log says why"


class Relay:
    """All requests that this gateway relays. `open` it, then `run` it."""

    def __init__(self, broker: Broker, route: str, shards: int, grace_seconds: float) -> None:
        self.route = route
        self._broker, self._shards, self._grace = broker, shards, grace_seconds
        self._own: dict[str, Following] = {}
        self._attached: dict[Following, Subscribed] = {}
        self._unwanted: set[Following] = set()  # whose cancel may be due
        self._round_at = 0.0  # when to look at all of them again
        self._refused_at = float("-inf")
        self._wake = asyncio.Event()
        self._backfill = Backfill(broker, shards, self._break, self.forget)

    def __len__(self) -> int:
        return len(self._own) + len(self._attached)

    @property
    def readers(self) -> int:
        """Followings that somebody waits for."""
        return sum(following.has_reader for following in self._all())

    async def open(self) -> None:
        """Subscribe; replies to what is published afterwards cannot be missed."""
        await self._broker.subscribe_direct(subjects.replies_to(self.route), self._on_reply)
        await self._broker.subscribe(subjects.ALL_READERS, self._on_reader)
        await self._broker.subscribe(subjects.ALL_FINDS, self._on_find)
        self._broker.on_reconnect.append(self._suspect_all)

    def expect(self, tenant: str, request_id: str, sink: Sink) -> Following:
        """Follow a request that is about to be published on this gateway's route."""
        subject = subjects.log(Log(tenant, self.route, request_id), self._shards)
        following = self._own[request_id] = self._following(tenant, request_id, subject, sink)
        following.subject = subject
        return following

    async def resume(self, tenant: str, request_id: str, sink: Sink, after: int = -1) -> Following:
        """`attach`; raises `RequestNotFound` if nobody knows of such a request.

        Where somebody might know of it who cannot be asked it is `BrokerUnavailable`.
        """
        with self.refusing():
            async with answered_within(RESUME_SECONDS):
                following = await self.attach(tenant, request_id, sink, after)
            if following.known:
                return following
            await self.forget(following)
            async with answered_within(RESUME_SECONDS):
                await leaders.check_unknown(self._broker, tenant, request_id)
        raise RequestNotFound(request_id)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Notes when what is inside is refused since the broker does not answer."""
        try:
            yield
        except BrokerUnavailable:
            self._refused_at = time.monotonic()
            raise

    async def attach(self, tenant: str, request_id: str, sink: Sink, after: int = -1) -> Following:
        """Follow a request from behind token `after`, or some before, whichever gateway it came to.

        It is paused until `go_on`. Raises `BrokerUnavailable`.
        """
        subject = subjects.log_on_any_route(tenant, request_id, self._shards)
        following = self._following(tenant, request_id, subject, sink)
        following.paused, following.after, following.writer = True, after, None
        following.known = await self._is_known(following)

        def on_reply(subject: bytes, data: bytes, headers: bytes) -> None:
            self._offer(following, data, headers)

        replies = subjects.reply_on_any_route(tenant, request_id)
        self._attached[following] = await self._broker.subscribe_direct(replies, on_reply)
        return following

    async def forget(self, following: Following) -> None:
        """Stop following; the request itself goes on. Idempotent."""
        following.sink = discard
        if self._own.get(following.request_id) is following:
            del self._own[following.request_id]
        if subscribed := self._attached.pop(following, None):
            await subscribed.unsubscribe()

    def cancel(self, following: Following) -> None:
        """Ask for the end of a request, again and again until it has come. Idempotent."""
        if following.cancel_at is None:
            following.cancel_at = 0.0
            self._unwanted.add(following)
            self._wake.set()

    def give_up(self, following: Following) -> None:
        """Cancel a request of which it is not known whether the broker has it."""
        following.sink = discard
        following.expires = min(following.expires, time.monotonic() + UNSURE_SECONDS)
        self.cancel(following)

    def go_on(self, following: Following) -> None:
        """The sink has room again."""
        if following.paused:
            following.paused = False
            self._backfill.want(following)

    def orphan(self, following: Following) -> None:
        """Its reader is gone: it lives on for the grace period, then it is cancelled."""
        following.sink = discard
        self.go_on(following)
        if following.orphaned_until is None:
            following.orphaned_until = time.monotonic() + self._grace

    async def run(self) -> None:
        """Read back what was missed, repeat cancels, end grace periods; never ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._backfill.run(), name="backfill")
            while True:
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                try:
                    await self._look(time.monotonic(), tasks)
                except BrokerUnavailable as error:
                    log.warning("relay_interrupted", reason=str(error))
                    await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """Tell the fleet of what nobody wants any more; the rest can be resumed elsewhere."""
        try:
            self._unwanted.update(self._all())
            await self._cancel_due(time.monotonic())
        except BrokerUnavailable as error:
            log.warning("cancels_not_sent", reason=str(error))

    def _all(self) -> list[Following]:
        return [*self._own.values(), *self._attached]

    def _following(self, tenant: str, request_id: str, subject: str, sink: Sink) -> Following:
        stream = topology.tokens_of(request_id, self._shards)
        now = time.monotonic()
        expires = now + topology.LOG_SECONDS
        return Following(tenant, request_id, stream, subject, sink, heard=now, expires=expires)

    def _on_reply(self, subject: bytes, data: bytes, headers: bytes) -> None:
        if following := self._own.get(subject[subject.rfind(b".") + 1 :].decode()):
            self._offer(following, data, headers)

    def _offer(self, following: Following, data: bytes, headers: bytes) -> None:
        following.heard = time.monotonic()
        try:
            if not following.offer(*sequences(headers), data):
                self._backfill.want(following)
        except Exception as error:
            self._break(following, error)
        if following.ended:
            self._leave(following)

    def _break(self, following: Following, error: Exception) -> None:
        """Its sink failed, which is our own fault: it ends, and nothing else does."""
        log.error("sink_failed", request_id=following.request_id, exc_info=error)
        sink, following.sink = following.sink, discard
        following.ended = True
        try:
            sink(messages.failed("internal_error", _OUR_FAULT, messages.usage(0, 0)), 0)
        except Exception:
            log.exception("sink_failed_again", request_id=following.request_id)

    def _leave(self, following: Following) -> None:
        """Let `run` forget it; the common case, our own requests, at once."""
        following.ended, following.sink = True, discard  # a call and its following hold each other
        if self._own.get(following.request_id) is following:
            del self._own[following.request_id]
        if following in self._attached:
            self._backfill.want(following)

    def _suspect_all(self) -> None:
        """The broker may have restarted and lost its memory."""
        for following in self._all():
            following.doubted = True
            self._backfill.want(following)

    async def _look(self, now: float, tasks: asyncio.TaskGroup) -> None:
        if now >= self._round_at:
            self._round_at = now + LOOK_SECONDS
            self._look_round(now, tasks)
        await self._cancel_due(now)

    def _look_round(self, now: float, tasks: asyncio.TaskGroup) -> None:
        for following in self._all():
            if following.wants_look(now):
                following.looked(now)
                self._backfill.want(following)
            if following.wants_cancel(now):
                self._unwanted.add(following)
            self._end_late(following, now, tasks)

    async def _cancel_due(self, now: float) -> None:
        while self._unwanted:
            following = self._unwanted.pop()
            if following.wants_cancel(now):
                subject = subjects.cancel(following.tenant, following.request_id)
                await self._broker.publish(subject)
                following.cancelled(now)

    def _end_late(self, following: Following, now: float, tasks: asyncio.TaskGroup) -> None:
        """What waited too long: for its end, for its log to come back, for another reader."""
        if now >= following.expires:
            following.fail("deadline_exceeded", "the deadline passed without a sign of the request")
            self._leave(following)
        elif following.wants_seek(now):
            following.sought(now)
            tasks.create_task(self._seek(following), name=f"seek-{following.request_id}")
        elif following.is_abandoned(now) and now < self._refused_at + self._grace:
            following.orphaned_until = self._refused_at + self._grace
        elif following.is_abandoned(now):
            following.orphaned_until = following.expires
            tasks.create_task(self._abandon(following), name=f"abandon-{following.request_id}")

    async def _seek(self, following: Following) -> None:
        """Ask who has the lost log, or will write it. If nobody does for long that is the end."""
        tenant, request_id = following.tenant, following.request_id
        if await leaders.is_known(self._broker, tenant, request_id):
            following.lost = time.monotonic()
        elif following.is_lost(time.monotonic(), LOST_SECONDS):
            try:
                await leaders.check_unknown(self._broker, tenant, request_id)
            except BrokerUnavailable as error:
                log.warning("log_sought", request_id=request_id, reason=str(error))
            else:
                following.fail("log_lost", "the broker has lost this request's output")
                self._leave(following)

    async def _abandon(self, following: Following) -> None:
        """The grace period is over: cancel the request, unless somebody else reads it."""
        reader = subjects.reader(following.tenant, following.request_id)
        if await self._broker.request(reader, b"", READER_SECONDS) is not None:
            self._leave(following)
        elif self._broker.connected:
            self.cancel(following)
        else:  # nobody could be asked
            following.orphaned_until = time.monotonic() + LOOK_SECONDS

    async def _is_known(self, following: Following) -> bool:
        """True if the request has a log, or somebody knows that it waits for one."""
        if await self._backfill.find(following) is not None:
            return True
        return await leaders.is_known(self._broker, following.tenant, following.request_id)

    async def _on_find(self, msg: Msg) -> None:
        if any(following.known and not following.lost for following in self._meant(msg)):
            await self._broker.publish(msg.reply, _YES)

    async def _on_reader(self, msg: Msg) -> None:
        if any(following.has_reader for following in self._meant(msg)):
            await self._broker.publish(msg.reply, _YES)

    def _meant(self, msg: Msg) -> list[Following]:
        """The followings here of the request that a question is about."""
        asked = subjects.parse_request_id(msg.subject)
        found = [self._own.get(asked[1]), *self._attached]
        return [f for f in found if f and (f.tenant, f.request_id) == asked]
