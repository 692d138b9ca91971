"""The leader of one model: an index of everything queued, and what it hears and tells."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from dispatcher import dead_letters, explain, report
from dispatcher.audit import Audit, IndexLost
from dispatcher.books import Books
from dispatcher.ending import Endings
from dispatcher.failure_detector import LOOK_SECONDS, FailureDetector
from dispatcher.fair_queue import service
from dispatcher.inventory import Inventory
from dispatcher.lines import Queued
from dispatcher.metrics import observe_blocked, observe_oldest, observe_queue
from dispatcher.recall import Recall
from dispatcher.recent import Recent
from dispatcher.sending import Sending
from dispatcher.succession import KEEP_SECONDS, Succession
from registry.store import Registry
from registry.tenants import Tenants
from streams import declaration, messages, subjects, topology
from streams.connection import Broker, Handler, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import Envelope
from streams.messages import Beat, LedgerRecord, Pressure
from streams.pull import Delivery, Pull

log = structlog.get_logger()

INDEX_BATCH = 2000
TELL_SECONDS = 0.2
TELL_SHARE = 0.05  # of the time may be spent on what is told
MOST_TELL_SECONDS = 1.0  # gateways trust it for two
RECALL_SECONDS = 0.2
AUDIT_SECONDS = 2.0
CANCEL_MEMORY_SECONDS = 30.0  # a cancel may overtake its request


class Leader:
    """Dispatches one model's requests for as long as `run` runs; one at a time, by lease."""

    def __init__(
        self, broker: Broker, registry: Registry, tenants: Tenants, model: str, shards: int
    ) -> None:
        self.model = model
        self.books = Books(model)
        self._broker, self._tenants, self._shards = broker, tenants, shards
        self._clock = broker.clock
        self._cancelled = Recent(CANCEL_MEMORY_SECONDS)
        self._unreadable: list[Delivery] = []
        self._tells_at = 0.0
        self._endings = Endings(broker, model, shards)
        self._sending = Sending(broker, registry, self.books, self._endings)
        self._failure_detector = FailureDetector(broker)
        self._recall = Recall(broker, self.books)
        self._audit = Audit(broker, self.books, self._endings, self._sending)
        self._inventory = Inventory(broker, self.books, shards)
        self._succession = Succession(broker, self.books)

    async def run(self) -> None:
        """Lead until cancelled. Everything known is rebuilt from the broker first."""
        async with AsyncExitStack() as stack:
            await self._subscribe(stack, self._heard())
            index = await declaration.take_over_index(self._broker, self.model)
            await self._resume()
            log.info("leading", model=self.model, in_flight=len(self.books.in_flight))
            await self._subscribe(stack, self._answered())
            await self._broker.publish(subjects.muster(self.model))
            await self._lead(index)

    async def _resume(self) -> None:
        """Know what is in flight, and go on with the tenants' counters where they were."""
        await self._succession.restore()
        self._set_terms()
        await self._inventory.look()
        await self._succession.replay()

    async def _lead(self, name: str) -> None:
        pull = Pull(self._broker, topology.REQUESTS, name, lambda: INDEX_BATCH, self._index)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pull.run(), name="index")
            tasks.create_task(self._sending.run(), name="send")
            tasks.create_task(self._endings.run(), name="end")
            tasks.create_task(_every(TELL_SECONDS, self._tell), name="tell")
            tasks.create_task(_every(LOOK_SECONDS, self._look_for_dead), name="failures")
            tasks.create_task(_every(RECALL_SECONDS, self._take_back), name="recall")
            tasks.create_task(_every(AUDIT_SECONDS, lambda: self._look(name)), name="audit")
            tasks.create_task(_every(KEEP_SECONDS, self._succession.keep), name="keep")

    async def _subscribe(self, stack: AsyncExitStack, handlers: dict[str, Handler]) -> None:
        for subject, handler in handlers.items():
            subscribed = await self._broker.subscribe(subject, handler)
            stack.push_async_callback(subscribed.unsubscribe)

    def _heard(self) -> dict[str, Handler]:
        return {
            subjects.fleet_of(self.model): self._on_beat,
            subjects.GONE: self._on_gone,
            subjects.ledger_of(self.model): self._on_ledger,
            subjects.ALL_CANCELS: self._on_cancel,
            dead_letters.ADVISORIES: self._on_advisory,
        }

    def _answered(self) -> dict[str, Handler]:
        return {
            subjects.ALL_FINDS: self._on_find,
            subjects.report(self.model): self._on_report,
        }

    # What comes in

    def _index(self, delivery: Delivery) -> None:
        """A queued request's headers; called for each, and again for all after a take-over."""
        try:
            item = _queued(delivery)
        except (KeyError, ValueError) as error:
            log.error("request_unreadable", seq=delivery.seq, error=repr(error))
            self._unreadable.append(delivery)
            return
        if item.request_id in self._endings:
            return
        if flight := self.books.in_flight.get(item.request_id):
            if flight.seq:  # only the acknowledgement of its dispatch got lost
                self._endings.acknowledge(item)
            return
        self._queue(item)

    def _queue(self, item: Queued) -> None:
        if tenant := self._tenants.get(item.tenant):
            self.books.queue.set_weight(item.tenant, tenant.weight)
        self.books.queue.push(item, self._clock.now())
        if _name(item.tenant, item.request_id) in self._cancelled:
            self._cancel(item.tenant, item.request_id)
        self._sending.wake()

    async def _on_beat(self, msg: Msg) -> None:
        self.books.beat(Beat.unpack(msg.data), time.monotonic())
        self._sending.wake()

    async def _on_gone(self, msg: Msg) -> None:
        worker = msg.data.decode()
        if worker in self.books.fleet:
            await self._lose(worker)

    async def _lose(self, worker: str) -> None:
        """Give back what a worker held that has died."""
        held = self.books.lose(worker)
        for reply in held:
            await self._broker.publish(reply, b"-NAK")
        log.warning("worker_gone", model=self.model, worker=worker, deliveries=len(held))
        self._sending.wake()

    async def _on_ledger(self, msg: Msg) -> None:
        record = messages.known(LedgerRecord, messages.unpack(msg.data))
        spent = service(record.prompt_tokens, record.completion_tokens)
        self.books.learn(record)
        self.books.settle(record.request_id, spent, time.monotonic())
        self._sending.wake()

    async def _on_cancel(self, msg: Msg) -> None:
        tenant, request_id = subjects.parse_request_id(msg.subject)
        self._cancelled.add(_name(tenant, request_id), time.monotonic())
        self._cancel(tenant, request_id)

    def _cancel(self, tenant: str, request_id: str) -> None:
        item = self.books.queue.get(request_id)
        if item and item.tenant == tenant:
            self.books.queue.remove(request_id)
            self._endings.put(item, "cancelled")

    async def _on_advisory(self, msg: Msg) -> None:
        message = await self._broker.get(topology.WORK, json.loads(msg.data)["stream_seq"])
        if message is None or not subjects.is_work(message.subject):
            return
        if subjects.parse_work(message.subject).model == self.model:
            await dead_letters.bury(self._broker, message, self._shards)

    async def _on_find(self, msg: Msg) -> None:
        tenant, request_id = subjects.parse_request_id(msg.subject)
        known = self.books.queue.get(request_id) or self.books.in_flight.get(request_id)
        if known and known.tenant == tenant:
            await self._broker.publish(msg.reply, b"known")

    async def _on_report(self, msg: Msg) -> None:
        now = self._clock.now()
        asked = json.loads(msg.data) if msg.data else None
        answer = self._explained(asked, now) if asked else report.report(self.books, now)
        await self._broker.publish(msg.reply, json.dumps(answer).encode())

    def _explained(self, asked: dict[str, str], now: float) -> explain.Facts | None:
        """What `millstream why` asks: how a request or a tenant stands."""
        if tenant := asked.get("tenant"):
            return explain.of_tenant(self.books, tenant)
        item = self.books.queue.get(asked["request_id"])
        version = self._sending.version_for(item) if item else None
        return explain.of_request(self.books, asked["request_id"], version, now)

    # What happens by time

    async def _tell(self) -> None:
        """Expire what is late, notice silent workers, and tell the gateways how things stand."""
        for item in self.books.queue.expired(self._clock.now()):
            self._endings.put(item, "deadline_exceeded", "the deadline passed in the queue")
        while self._unreadable:
            await self._unreadable.pop().terminate()
        for worker in self.books.tick(time.monotonic()):
            log.warning("worker_silent", model=self.model, worker=worker)
        self._cancelled.forget(time.monotonic())
        self._observe_blocked()
        self._sending.wake()
        if time.monotonic() >= self._tells_at:
            pressure = self._pressure()
            observe_queue(self.books, pressure)
            await self._broker.publish(subjects.pressure(self.model), pressure.pack())

    async def _look_for_dead(self) -> None:
        now = time.monotonic()
        for worker in await self._failure_detector.dead(self.books.fleet.silent(now), now):
            await self._lose(worker)

    async def _take_back(self) -> None:
        for stray in self.books.strays(self._clock.now()):
            await self._recall.take_back(stray)

    def _pressure(self) -> Pressure:
        """With ten thousand tenants it takes a while; then it is told less often."""
        began = time.monotonic()
        pressure = self.books.pressure()
        spent = time.monotonic() - began
        self._tells_at = began + min(MOST_TELL_SECONDS, spent / TELL_SHARE)
        return pressure

    def _observe_blocked(self) -> None:
        """What the next in line has waited for since the last time."""
        if head := self.books.queue.peek(self._clock.now()):
            why = explain.reason(self.books, self._sending.version_for(head), head.cost)
            observe_blocked(self.model, why, TELL_SECONDS)

    async def _look(self, consumer: str) -> None:
        await self._inventory.look()
        await self._audit.look(consumer)
        self._set_terms()
        observe_oldest(self.books, self._clock.now())
        self._sending.wake()

    def _set_terms(self) -> None:
        tenants = self._tenants.by_name.values()
        for tenant in tenants:
            if tenant.weight != 1:
                self.books.queue.set_weight(tenant.name, tenant.weight)
        self.books.queue.reserve({t.name: t.reserved_tokens for t in tenants if t.reserved_tokens})


async def _every(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await act()
        except IndexLost:
            raise
        except (BrokerUnavailable, StoreRefused, NatsError, TimeoutError) as error:
            log.warning("leader_interrupted", reason=repr(error))


def _queued(delivery: Delivery) -> Queued:
    """Raises KeyError or ValueError for headers that are not ours."""
    envelope = Envelope.from_headers(delivery.headers)
    return Queued(
        request_id=envelope.request_id,
        tenant=sys.intern(envelope.tenant),
        priority=subjects.parse_lane(delivery.subject).priority,
        prompt_tokens=envelope.prompt_tokens,
        cost=envelope.cost,
        accepted=envelope.accepted,
        deadline=envelope.deadline,
        route=sys.intern(envelope.route),
        version=sys.intern(envelope.version),
        seq=delivery.seq,
        reply=delivery.reply,
        adapter=sys.intern(envelope.adapter),
        account=sys.intern(envelope.account),
    )


def _name(tenant: str, request_id: str) -> str:
    return f"{tenant}.{request_id}"
