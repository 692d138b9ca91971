"""The leader of one model: receives its messages, runs its timers, and keeps its state.

Messages are queued requests, heartbeats, ledger records, cancels and queries; timers requeue,
reconcile, report pressure to gateways and save checkpoints.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from dispatcher import explain, lag_report
from dispatcher.dispatching.dispatch_loop import DispatchLoop
from dispatcher.dispatching.metrics import (
    observe_blocked,
    observe_oldest,
    observe_queue,
    observe_submissions,
)
from dispatcher.dispatching.model_state import ModelState
from dispatcher.dispatching.terminals import TerminalWriter
from dispatcher.estimate.ttl_set import TtlSet
from dispatcher.queueing.fair_queue import service_tokens
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.reconcile import dead_letters
from dispatcher.reconcile.departed_consumers import DepartedConsumers
from dispatcher.reconcile.in_flight_requests import InFlightReconciler
from dispatcher.reconcile.leader_failover import CHECKPOINT_SECONDS, LeaderFailover
from dispatcher.reconcile.queued_requests import IndexLost, QueuedReconciler
from dispatcher.reconcile.requeuer import Requeuer
from dispatcher.reconcile.waiting_submissions import WaitingSubmissions
from dispatcher.workers.failure_detector import CHECK_SECONDS, FailureDetector
from dispatcher.workers.placed_requests import Stage
from registry.store import Registry
from registry.tenants import Tenants
from streams import signals, subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, MessageHandler, StoreRefused
from streams.broker.pull_loop import Delivery, PullLoop
from streams.coordination.heartbeats import InvalidHeartbeat, parse_heartbeat
from streams.coordination.signal_handler import SignalHandler
from streams.errors import BrokerUnavailable
from streams.headers import Envelope
from streams.messages import Heartbeat, Pressure
from streams.records.ledger_checks import ForgedRecord, unpack_stored_record
from streams.subjects import Priority

log = structlog.get_logger()

INDEX_BATCH = 2000
TICK_SECONDS = 0.2
PRESSURE_TIME_FRACTION = 0.05  # of the time may be spent on building pressure reports
MAX_PRESSURE_SECONDS = 1.0  # between two reports; gateways trust one for two seconds
REQUEUE_SECONDS = 0.2
RECONCILE_SECONDS = 2.0
CANCEL_MEMORY_SECONDS = 30.0  # since a cancel may overtake its request


class ModelDispatcher:
    """Queues and dispatches the requests of one model while `run` runs.

    A dispatcher makes a new one each time that it gets the model's lease, so that a model has one
    leader at a time. `shards` is the number of streams over which the requests' token logs are
    spread.
    """

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        tenants: Tenants,
        submissions: WaitingSubmissions,
        model: str,
        shards: int,
    ) -> None:
        self.model = model
        self.state = ModelState(model)
        self._broker, self._tenants, self._shards = broker, tenants, shards
        self._clock, self._submissions = broker.clock, submissions
        self._recent_cancels = TtlSet(CANCEL_MEMORY_SECONDS)
        self._unreadable: list[Delivery] = []
        self._next_pressure_at = 0.0
        self._unserved = asyncio.Event()  # set by the first request that finds no worker
        self._terminals = TerminalWriter(broker, model, shards)
        self._dispatch_loop = DispatchLoop(broker, registry, self.state, self._terminals)
        self._failure_detector = FailureDetector(broker)
        self._requeuer = Requeuer(broker, self.state)
        self._queued_reconciler = QueuedReconciler(
            broker, self.state, self._terminals, self._dispatch_loop
        )
        self._in_flight_reconciler = InFlightReconciler(broker, self.state, shards)
        self._departed_consumers = DepartedConsumers(broker, self.state)
        self._failover = LeaderFailover(broker, self.state)

    async def run(self) -> None:
        """Rebuild the model's state from the broker, then dispatch requests until cancelled.

        Nothing is dispatched before the predecessor's checkpoint is restored and the requests that
        it dispatched are known. Raises the broker's errors while it starts. Later, errors of the
        broker in timers are only logged, but an exception group is raised if a task fails, as with
        `IndexLost`. A leader that has ended cannot be run again: make a new one.
        """
        async with AsyncExitStack() as stack:
            await self._subscribe(stack, self._event_handlers())
            index = await declaration.replace_index_consumer(self._broker, self.model)
            await self._queued_reconciler.remember_stream()
            await self._restore_state()
            log.info("leading", model=self.model, in_flight=len(self.state.in_flight))
            await self._subscribe(stack, self._query_handlers())
            await self._broker.publish(subjects.muster(self.model))
            await self._run_tasks(index)

    async def _restore_state(self) -> None:
        """Restore the tenants' counters, and learn what is in flight."""
        await self._failover.restore()
        self._apply_tenant_settings()
        await self._in_flight_reconciler.reconcile()
        await self._failover.replay_ledger()

    async def _run_tasks(self, index: str) -> None:
        pull = PullLoop(
            self._broker, topology.REQUESTS, index, lambda: INDEX_BATCH, self._on_request
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pull.run(), name="index")
            tasks.create_task(self._dispatch_loop.run(), name="dispatch")
            tasks.create_task(self._terminals.run(), name="terminals")
            tasks.create_task(self._report_unserved(), name="unserved")
            for task, seconds, act in self._timers(index):
                tasks.create_task(_run_every(task, seconds, act), name=task)

    def _timers(self, index: str) -> Iterator[tuple[str, float, Callable[[], Awaitable[None]]]]:
        yield "tick", TICK_SECONDS, self._tick
        yield "failures", CHECK_SECONDS, self._check_failures
        yield "requeue", REQUEUE_SECONDS, self._requeue_stranded
        yield "reconcile", RECONCILE_SECONDS, lambda: self._reconcile(index)
        yield "checkpoint", CHECKPOINT_SECONDS, self._failover.save

    async def _subscribe(self, stack: AsyncExitStack, handlers: dict[str, MessageHandler]) -> None:
        for subject, handler in handlers.items():
            subscription = await self._broker.subscribe(subject, handler)
            stack.push_async_callback(subscription.unsubscribe)

    def _event_handlers(self) -> dict[str, MessageHandler]:
        gone = SignalHandler(signals.parse_gone, self._on_gone)
        cancels = SignalHandler(signals.parse_cancel, self._on_cancel)
        return {
            subjects.fleet_of(self.model): self._on_beat,
            subjects.heard(subjects.GONE): gone.receive,
            subjects.billed_of(self.model): self._on_ledger,
            subjects.heard(subjects.ALL_CANCELS): cancels.receive,
            dead_letters.MAX_DELIVERIES_ADVISORIES: self._on_advisory,
        }

    def _query_handlers(self) -> dict[str, MessageHandler]:
        return {
            subjects.ALL_FINDS: self._on_find,
            subjects.report(self.model): self._on_report,
        }

    # Messages

    def _on_request(self, delivery: Delivery) -> None:
        """Take in a queued request's headers; a new leader gets those of all requests again."""
        try:
            item = _parse_queued(delivery)
        except (KeyError, ValueError) as error:
            log.error("request_unreadable", seq=delivery.seq, error=repr(error))
            self._unreadable.append(delivery)
            return
        if item.request_id in self._terminals:
            return
        if flight := self.state.in_flight.get(item.request_id):
            if flight.stage >= Stage.PUBLISHED:  # only its acknowledgement was lost
                self._terminals.acknowledge(item)
            return
        self._enqueue(item)

    def _enqueue(self, item: QueuedRequest) -> None:
        if tenant := self._tenants.get(item.tenant):
            self.state.queue.set_weight(item.tenant, tenant.weight)
        self.state.queue.enqueue(item, self._clock.now())
        if len(self.state.queue) == 1 and not self.state.fleet.last_heartbeats():
            self._unserved.set()
        if _cancel_key(item.tenant, item.request_id) in self._recent_cancels:
            self._cancel(item.tenant, item.request_id)
        self._dispatch_loop.wake()

    async def _on_beat(self, msg: Msg) -> None:
        try:
            beat = parse_heartbeat(msg.subject, msg.headers or {}, msg.data)
        except InvalidHeartbeat as error:
            log.warning("heartbeat_ignored", subject=msg.subject, reason=str(error))
            return
        if beat.drained and not (beat.running or beat.waiting):
            self._remove_drained_worker(beat)
        else:
            self.state.apply_heartbeat(beat, time.monotonic())
        self._dispatch_loop.wake()

    def _remove_drained_worker(self, beat: Heartbeat) -> None:
        """Remove a worker of a version at its own word: it has finished or handed over its work."""
        if self.state.fleet.last_heartbeat(beat.worker, beat.version):
            self._departed_consumers.add(beat.worker, beat.version)
            self.state.remove_worker(beat.worker, beat.version)
            log.info(
                "worker_drained",
                model=self.model,
                version=beat.version,
                worker=beat.worker,
                **beat.drained,
            )

    async def _on_gone(self, worker: str) -> None:
        """Remove a worker that is said to have died, unless it answers."""
        if worker not in self.state.fleet:
            return
        if await self._failure_detector.is_dead(worker):
            await self._handle_dead_worker(worker)
        else:
            log.warning("worker_not_dead", model=self.model, worker=worker)

    async def _handle_dead_worker(self, worker: str) -> None:
        """Have the broker deliver again what a dead worker held."""
        self._departed_consumers.add(worker)
        held = self.state.remove_worker(worker)
        for reply in held:
            await self._broker.publish(reply, b"-NAK")
        log.warning("worker_dead", model=self.model, worker=worker, deliveries=len(held))
        self._dispatch_loop.wake()

    async def _on_ledger(self, msg: Msg) -> None:
        try:
            record = unpack_stored_record(msg.subject, msg.data)
        except ForgedRecord as error:
            log.error("ledger_record_unreadable", model=self.model, reason=str(error))
            return
        spent = service_tokens(record.prompt_tokens, record.completion_tokens)
        self.state.learn_duration(record)
        self.state.settle(record.request_id, spent, time.monotonic())
        self._dispatch_loop.wake()

    async def _on_cancel(self, cancelled: tuple[str, str]) -> None:
        tenant, request_id = cancelled
        self._recent_cancels.add(_cancel_key(tenant, request_id), time.monotonic())
        self._cancel(tenant, request_id)

    def _cancel(self, tenant: str, request_id: str) -> None:
        """End a queued request as cancelled; workers hear of the cancel themselves."""
        item = self.state.queue.get(request_id)
        if item and item.tenant == tenant:
            self.state.queue.remove(request_id)
            self._terminals.end_request(item, "cancelled")

    async def _on_advisory(self, msg: Msg) -> None:
        """End work that has used up its deliveries, if it is of this model."""
        seq = dead_letters.parse_advisory(msg.subject, msg.headers or {}, msg.data)
        message = await self._broker.get(topology.WORK, seq) if seq else None
        if message is None or not subjects.is_work(message.subject):
            return
        if subjects.parse_work(message.subject).model == self.model:
            await dead_letters.end_undeliverable(self._broker, message, self._shards)

    async def _on_find(self, msg: Msg) -> None:
        """Answer a query for a request that this leader knows."""
        tenant, request_id = subjects.parse_request_id(msg.subject)
        known = self.state.queue.get(request_id) or self.state.in_flight.get(request_id)
        if known and known.tenant == tenant:
            await self._broker.publish(msg.reply, b"known")

    async def _on_report(self, msg: Msg) -> None:
        now = self._clock.now()
        asked = json.loads(msg.data) if msg.data else None
        submissions = self._submissions.of_model(self.model)
        answer = (
            self._explain(asked, now, submissions)
            if asked
            else lag_report.build_lag_report(self.state, now, submissions)
        )
        await self._broker.publish(msg.reply, json.dumps(answer).encode())

    def _explain(
        self,
        asked: dict[str, str],
        now: float,
        submissions: Mapping[tuple[str, Priority], int],
    ) -> explain.Facts | None:
        """Answer `millstream why`: where a request or a tenant stands."""
        if tenant := asked.get("tenant"):
            return explain.explain_tenant(self.state, tenant, submissions)
        item = self.state.queue.get(asked["request_id"])
        version = self._dispatch_loop.resolve_version(item) if item else None
        return explain.explain_request(self.state, asked["request_id"], version, now, submissions)

    # Timers

    async def _tick(self) -> None:
        """End late requests, notice silent workers, and report pressure to the gateways."""
        for item in self.state.queue.pop_expired(self._clock.now()):
            self._terminals.end_request(
                item, "deadline_exceeded", "the deadline passed in the queue"
            )
        while self._unreadable:
            await self._unreadable.pop().terminate()
        for worker in self.state.tick(time.monotonic()):
            log.warning("worker_silent", model=self.model, worker=worker)
        self._recent_cancels.expire(time.monotonic())
        self._observe_blocked()
        self._dispatch_loop.wake()
        if time.monotonic() >= self._next_pressure_at:
            await self._report_pressure()

    async def _report_pressure(self) -> None:
        pressure = self._measure_pressure()
        observe_queue(self.state, pressure)
        await self._broker.publish(subjects.pressure(self.model), pressure.pack())

    async def _report_unserved(self) -> None:
        """Report at once that a request waits and there is no worker, so that one can be started.

        Runs until cancelled. A report that cannot be sent is logged; the next one comes anyway.
        """
        while True:
            await self._unserved.wait()
            self._unserved.clear()
            try:
                await self._report_pressure()
            except BrokerUnavailable as error:
                log.warning("pressure_not_reported", model=self.model, reason=str(error))

    async def _check_failures(self) -> None:
        now = time.monotonic()
        for worker in await self._failure_detector.find_dead(
            self.state.fleet.find_late_workers(now), now
        ):
            await self._handle_dead_worker(worker)

    async def _requeue_stranded(self) -> None:
        for stranded in self.state.find_stranded(self._clock.now()):
            await self._requeuer.requeue(stranded)

    def _measure_pressure(self) -> Pressure:
        """Build the pressure report, and decide when to build the next.

        With ten thousand tenants it takes a while; then it is built less often.
        """
        began = time.monotonic()
        pressure = self.state.build_pressure()
        spent = time.monotonic() - began
        self._next_pressure_at = began + min(MAX_PRESSURE_SECONDS, spent / PRESSURE_TIME_FRACTION)
        return pressure

    def _observe_blocked(self) -> None:
        """Count the time since the last tick for the reason why the next request still waits."""
        if head := self.state.queue.peek(self._clock.now()):
            reason = explain.find_blocking_reason(
                self.state, self._dispatch_loop.resolve_version(head), head
            )
            observe_blocked(self.model, reason, TICK_SECONDS)

    async def _reconcile(self, consumer: str) -> None:
        await self._in_flight_reconciler.reconcile()
        await self._queued_reconciler.reconcile(consumer)
        await self._departed_consumers.remove()
        self._apply_tenant_settings()
        observe_oldest(self.state, self._clock.now())
        observe_submissions(self.model, self._submissions.of_model(self.model))
        self._dispatch_loop.wake()

    def _apply_tenant_settings(self) -> None:
        tenants = self._tenants.by_name.values()
        for tenant in tenants:
            if tenant.weight != 1:
                self.state.queue.set_weight(tenant.name, tenant.weight)
        self.state.queue.set_reserved_tokens(
            {t.name: t.reserved_tokens for t in tenants if t.reserved_tokens}
        )


async def _run_every(task: str, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    """Call `act` every so many seconds until cancelled; an error of the broker is only logged.

    `IndexLost` is raised: then leadership ends.
    """
    while True:
        await asyncio.sleep(seconds)
        try:
            await act()
        except IndexLost:
            raise
        except (BrokerUnavailable, StoreRefused, NatsError, TimeoutError) as error:
            log.warning("leader_task_failed", task=task, reason=repr(error))


def _parse_queued(delivery: Delivery) -> QueuedRequest:
    """Parse a delivery of REQUESTS. Raises KeyError or ValueError for headers that are not ours."""
    envelope = Envelope.from_headers(delivery.headers)
    return QueuedRequest(
        request_id=envelope.request_id,
        tenant=sys.intern(envelope.tenant),
        priority=subjects.parse_lane(delivery.subject).priority,
        prompt_tokens=envelope.prompt_tokens,
        cost=envelope.cost,
        accepted=envelope.accepted,
        deadline=envelope.deadline,
        route=sys.intern(envelope.route),
        version=sys.intern(envelope.version),
        tokenized_for=sys.intern(envelope.tokenized_for),
        seq=delivery.seq,
        reply=delivery.reply,
        adapter=sys.intern(envelope.adapter),
        account=sys.intern(envelope.account),
        goal_ms=envelope.goal_ms,
        key=sys.intern(envelope.key),
        user=envelope.user,
        price=sys.intern(envelope.price),
        item=envelope.item,
        answer=envelope.answer,
        encoding=envelope.encoding,
    )


def _cancel_key(tenant: str, request_id: str) -> str:
    return f"{tenant}.{request_id}"
