"""Serves one model version on this worker: its engine, pull loops, attempts, credit, heartbeat."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf

import structlog

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.attempt.finished_logs import FinishedLogs, restore_log
from gpu_worker.attempt.start_quarantine import StartQuarantine
from gpu_worker.attempt.terminals import FinishedRequest, StopReason
from gpu_worker.compute_meter import ModelMeter
from gpu_worker.engines.driver import Driver, EngineCrashed
from gpu_worker.engines.engine import (
    Engine,
    FreeCapacity,
    Output,
    Preemptive,
    ReportsCache,
    ReportsStats,
    Throttled,
)
from gpu_worker.engines.engine_holder import EngineHolder
from gpu_worker.engines.engine_stats import EngineStats
from gpu_worker.engines.engine_watchdog import EngineHung, wait_for_failure
from gpu_worker.identity import WorkerIdentity
from gpu_worker.pool.ack_keepalive import AckKeepalive
from gpu_worker.pool.credit import Credit, TokenRate
from gpu_worker.pool.handover_selection import Handover
from gpu_worker.pool.heartbeat import HeartbeatSender
from gpu_worker.pool.peer_heartbeats import PeerHeartbeats
from gpu_worker.pool.progress_report import PROGRESS_REPORT_SECONDS, ProgressReporter, TokenCounts
from gpu_worker.pool.pull_loops import PullLoops
from streams.broker.broker_client import Broker, StoreRefused
from streams.broker.pull_loop import Delivery
from streams.broker.retry import retry_forever, wait_for_tasks
from streams.errors import BrokerUnavailable
from streams.messages import Heartbeat
from streams.records import dead_letters
from streams.records.token_log_cache import RecordPage, RecordsQuery
from streams.subjects import Priority

log = structlog.get_logger()

_HANDOVER_CHECK_SECONDS = 0.1  # between two checks which peers can take over attempts
# A delivery is reported in heartbeats for so long, since one of them may be lost
_REPORT_RECEIVED_SECONDS = 1.0
_MAX_RECEIVED_REPORTED = 1024  # deliveries per heartbeat
_EMPTY_SECONDS = 5.0  # for a model that is served no longer to pull what was sent to it
_PEERS_SECONDS = 0.3  # between two looks at peers that have the model loaded
_MAX_NOT_LOADED = 16  # reasons in one heartbeat
_RELEASE_SECONDS = 2.0  # for released attempts to return their work to the broker
OnFinished = Callable[[FinishedRequest], None]


class ModelServer:
    """Serves one model version on this worker, with or without a loaded engine, until drained.

    `attach_engine` and `stop_engine` bring and remove its engine. Without one it announces free
    capacity for one request of up to `context_length` tokens, which will wait for an engine, and
    none while a peer that has the model loaded has room: it is loaded anew only where it must.
    `on_finished` is called with each finished request, `on_change` when a request begins or ends
    and when the engine has failed. An engine that takes more than `engine_timeout_seconds` for one
    step counts as hung. `meter` counts the engine's time.
    """

    def __init__(
        self,
        broker: Broker,
        identity: WorkerIdentity,
        context_length: int,
        on_finished: OnFinished,
        engine_timeout_seconds: float,
        meter: ModelMeter,
    ) -> None:
        self.identity, self._meter = identity, meter
        self._capacity_without_engine = FreeCapacity(1, context_length)
        self.credit = Credit(self._capacity_without_engine)
        self._broker, self._on_finished = broker, on_finished
        self._throttled: Throttled | None = None
        self._stats_source: ReportsStats | None = None
        self._engine_timeout = engine_timeout_seconds
        self._engine_holder = EngineHolder(self._route_outputs, identity.model, self._meter)
        self._start_quarantine = StartQuarantine()
        self._finished_logs = FinishedLogs()
        self._attempts: dict[str, Attempt] = {}
        self._ack_keepalive = AckKeepalive(broker, self._attempts)
        self._attempt_tasks: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._pull_loops = PullLoops(broker, identity, self._pull_limit, self._accept_delivery)
        self._heartbeat = HeartbeatSender(broker, identity, self._build_full_heartbeat)
        self._rate = TokenRate(time.monotonic())
        self._progress = ProgressReporter()
        self._last_heartbeat_at = -inf
        self._is_open = True
        self._without_engine = asyncio.Event()
        self._without_engine.set()
        self._is_yielding = False
        self.not_loaded: Mapping[str, str] = {}  # of the worker's models, why they are not
        self.is_draining = self._is_leaving = False
        self.is_reclaimed = False  # the provider takes this machine back
        self._drained_counts: dict[str, int] = {}
        self.failure: EngineCrashed | EngineHung | None = None  # of the last engine
        self.load: dict[str, float] = {}  # what the last load has measured, for heartbeats
        self.on_change: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        """True while no request is held here, whether it runs or waits to start."""
        return not self._attempts

    @property
    def stats(self) -> EngineStats | None:
        """Counters of the loaded engine; None without an engine, or for one that counts nothing."""
        return self._stats_source.stats if self._stats_source else None

    @property
    def accepts_work(self) -> bool:
        """True if new work may be pulled: `set_accepting` allows it, and no drain has begun.

        Without an engine, only if no peer with one has room.
        """
        return self._is_open and not self.is_draining and not self._is_yielding

    @property
    def _announces_room(self) -> bool:
        """True if new work may be sent here: who leaves still pulls what has been sent."""
        return self.accepts_work and not self._is_leaving

    def set_accepting(self, is_open: bool) -> None:
        """Allow new work (True), or announce no credit and give up outstanding pulls (False).

        Returns at once; requests held here go on. Idempotent.
        """
        if is_open != self._is_open:
            self._is_open = is_open
            if not is_open:
                self._pull_loops.withdraw()
            self._announce_credit()

    def attach_engine(self, engine: Engine) -> None:
        """Start a loaded engine in its thread and announce its capacity; returns at once.

        Requests that have waited for an engine are given to it first. There must be no engine yet.
        `failure`, that of an earlier engine, becomes None.
        """
        self.failure = None
        self._without_engine.clear()
        self._is_yielding = False
        preempts = isinstance(engine, Preemptive) and engine.preempts
        self.credit.resize(engine.free_capacity(), preempts)
        self._throttled = engine if isinstance(engine, Throttled) else None
        self._stats_source = engine if isinstance(engine, ReportsStats) else None
        self._heartbeat.cache = engine if isinstance(engine, ReportsCache) else None
        driver = self._engine_holder.attach(engine)
        if self._tasks:
            self._tasks.create_task(self._watch_engine(driver), name="engine")
        self._announce_credit()

    async def stop_engine(self) -> None:
        """Stop the engine after its current step, and return when its memory is free.

        Sequences still in the engine are lost without an output. Without an engine this does
        nothing.
        """
        self._detach_engine()
        await self._engine_holder.stop()

    def _detach_engine(self) -> None:
        self._throttled = self._stats_source = self._heartbeat.cache = None
        self.credit.resize(self._capacity_without_engine)
        self._without_engine.set()
        self._heartbeat.send_soon()

    async def release_all(self) -> None:
        """Stop all attempts, so that other workers get their work at once.

        Waits up to two seconds for the attempts to end. Nothing is raised if some have not.
        """
        for attempt in list(self._attempts.values()):
            attempt.stop(StopReason.RELEASED)
        await wait_for_tasks(self._attempt_tasks, _RELEASE_SECONDS)

    async def run(self, beat_seconds: float, ack_wait_seconds: float) -> None:
        """Pull work, run attempts and send heartbeats until cancelled.

        A heartbeat is sent, and work reported as in progress, every `beat_seconds`. Outages of the
        broker are waited out. Raises `TopologyMismatch` if the broker refuses a consumer.
        """
        await retry_forever(self._heartbeat.listen)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._pull_loops.start(tasks, ack_wait_seconds)
            tasks.create_task(
                self._heartbeat.run(partial(self._heartbeat_interval, beat_seconds)),
                name="heartbeat",
            )
            tasks.create_task(
                self._ack_keepalive.run(beat_seconds, ack_wait_seconds), name="ack-keepalive"
            )
            tasks.create_task(
                self._ack_keepalive.abandon_when_cut_off(ack_wait_seconds), name="broker-outage"
            )
            tasks.create_task(self._yield_to_peers(), name="peers")
            if driver := self._engine_holder.driver:
                tasks.create_task(self._watch_engine(driver), name="engine")

    def cancel(self, tenant: str, request_id: str) -> None:
        """Tell a tenant's request to end as cancelled; returns at once.

        A request that is not held here, or is another tenant's, is ignored. Idempotent.
        """
        attempt = self._attempts.get(request_id)
        if attempt and attempt.envelope.tenant == tenant:
            attempt.stop(StopReason.CANCELLED)

    def has_request(self, tenant: str, request_id: str) -> bool:
        """Return True if the tenant's request runs here, or has finished here and its log is kept.

        In the second case the log is stored again, in a task, if the brokers have lost it.
        """
        running = self._attempts.get(request_id)
        if finished := self._finished_logs.get(tenant, request_id, time.monotonic()):
            assert self._tasks
            self._tasks.create_task(restore_log(finished), name=f"restore-{request_id}")
        return bool(finished or (running and running.envelope.tenant == tenant))

    def read_cached_log(self, query: RecordsQuery) -> RecordPage | None:
        """Return the queried records of a request that runs here, from memory; may be empty.

        None if the request does not run here or is another tenant's.
        """
        attempt = self._attempts.get(query.request_id)
        is_tenants = attempt and attempt.envelope.tenant == query.tenant
        return attempt.read_cached_log(query) if attempt and is_tenants else None

    async def drain(self, seconds_left: Callable[[], float]) -> int:
        """Stop pulling, end all attempts by the time `seconds_left()` is 0, and return.

        Attempts that would end in time are finished here. The others, first those that have not
        begun, are left to other workers: each as soon as one of these has free capacity for it, and
        all that remain at the end. Returns how many were handed over in this way.
        """
        self.is_draining = True
        self._heartbeat.send_soon()
        await self._pull_loops.stop()
        handed_over = 0
        async with Handover(self._broker, self.identity) as handover:
            while self._attempts and (left := seconds_left()):
                for attempt in handover.choose_attempts(self._attempts.values(), left):
                    attempt.stop(StopReason.RELEASED)
                    handed_over += 1
                await wait_for_tasks(self._attempt_tasks, min(left, _HANDOVER_CHECK_SECONDS))
        handed_over += sum(attempt.is_active for attempt in self._attempts.values())
        await self.release_all()
        return handed_over

    async def leave(self, seconds_left: Callable[[], float]) -> int:
        """Drain as `drain` does while the worker goes on, and tell the model's leader of the end.

        First what has been sent to the model's pool is pulled, in up to five seconds: nobody else
        may serve the version any more.
        """
        self._is_leaving = True
        self._heartbeat.send_soon()
        held = self.credit.held
        if self._tasks and self._engine_holder.driver:
            try:
                await self._pull_loops.wait_until_empty(min(seconds_left(), _EMPTY_SECONDS))
            except BrokerUnavailable as error:
                log.warning("work_not_counted", reason=str(error))
        handed_over = await self.drain(seconds_left)
        await self._heartbeat.stop_listening()
        await self.announce_drained(
            {"finished": max(0, held - handed_over), "handed_over": handed_over}
        )
        return handed_over

    async def _yield_to_peers(self) -> None:
        """While there is no engine, accept nothing that a peer with one has room for."""
        while True:
            await self._without_engine.wait()
            async with PeerHeartbeats(self._broker, self.identity) as peers:
                self._set_yielding(True)  # until they have had time to answer
                while self._without_engine.is_set():
                    await asyncio.sleep(_PEERS_SECONDS)
                    has_room = peers.capacity.has_room(time.monotonic())
                    self._set_yielding(has_room and self._without_engine.is_set())

    def _set_yielding(self, is_yielding: bool) -> None:
        if is_yielding != self._is_yielding:
            self._is_yielding = is_yielding
            if is_yielding:
                self._pull_loops.withdraw()
            self._announce_credit()

    async def announce_drained(self, counts: dict[str, int]) -> None:
        """Tell the model's leader that this worker has drained and is about to end.

        `counts` is the worker's `DrainReport` as a dict. Best effort, as any heartbeat is: a leader
        that does not hear of it takes the worker for silent after three seconds.
        """
        self._drained_counts = counts
        await self._heartbeat.send()

    def _pull_limit(self, priority: Priority) -> int:
        self._update_concurrency_limit()
        return self.credit.pull_batch_size(priority) if self.accepts_work else 0

    def _announce_credit(self) -> None:
        """Send a heartbeat and pull again, because credit has grown or may have."""
        self._heartbeat.send_soon()
        self._pull_loops.wake()

    def _update_concurrency_limit(self) -> None:
        """Set the credit's limit to a throttled engine's own, before each pull and heartbeat."""
        if self._throttled:
            before, self.credit.concurrency_limit = (
                self.credit.concurrency_limit,
                self._throttled.concurrency_limit(),
            )
            if self.credit.concurrency_limit > before:
                self._announce_credit()

    def _update_credit_use(self) -> None:
        """Count the tokens that requests have generated, which leaves them fewer to reserve."""
        for request_id, attempt in self._attempts.items():
            envelope = attempt.envelope
            self.credit.update_generated(
                request_id, envelope.prompt_tokens, envelope.cost, attempt.stored_tokens
            )

    def _accept_delivery(self, delivery: Delivery) -> None:
        assert self._tasks
        if self.is_draining:
            self._tasks.create_task(_nak(delivery), name=f"nak-{delivery.seq}")
            return
        envelope = dead_letters.parse_work_envelope(delivery)
        if envelope is None:
            self._tasks.create_task(
                _store_dead_letter(self._broker, delivery), name=f"dead-letter-{delivery.seq}"
            )
            return
        if running := self._attempts.get(envelope.request_id):
            running.accept_redelivery(delivery)  # its ack wait ran out, but it still runs here
            return
        parts = (
            self._broker,
            self._engine_holder,
            self._start_quarantine,
            delivery,
            envelope,
            self.identity,
            self._finished_logs,
            self._meter,
        )
        self._start_attempt(Attempt(*parts))

    def _start_attempt(self, attempt: Attempt) -> None:
        assert self._tasks
        request_id = attempt.envelope.request_id
        self._attempts[request_id] = attempt
        envelope = attempt.envelope
        self.credit.reserve(request_id, envelope.prompt_tokens, envelope.cost, attempt.priority)
        self._heartbeat.send_soon()
        self.on_change()
        task = self._tasks.create_task(self._run_attempt(attempt), name=f"attempt-{request_id}")
        self._attempt_tasks.add(task)
        task.add_done_callback(self._attempt_tasks.discard)

    async def _run_attempt(self, attempt: Attempt) -> None:
        request_id = attempt.envelope.request_id
        try:
            if finished := await attempt.run():
                self._on_finished(finished)
        except BrokerUnavailable as error:
            log.warning("work_not_settled", request_id=request_id, reason=str(error))
        finally:
            attempt.count_lost_time()
            del self._attempts[request_id]
            self.credit.release(request_id)
            self._announce_credit()
            self.on_change()

    def _route_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._rate.total_tokens += len(output.tokens)
            if attempt := self._attempts.get(output.request_id):
                attempt.receive_output(output)

    def build_heartbeat(self) -> Heartbeat:
        """Return a heartbeat with this model's present free capacity and token rate.

        The progress of single requests, the deliveries received and the cache report are left out.
        """
        self._update_concurrency_limit()
        self._update_credit_use()
        credit = self.credit
        return Heartbeat(
            worker=self.identity.worker,
            model=self.identity.model,
            version=self.identity.version,
            free_sequences=credit.free_sequences if self._announces_room else 0,
            free_tokens=credit.free_tokens if self._announces_room else 0,
            running=min(credit.held, credit.max_sequences),
            waiting=max(0, credit.held - credit.max_sequences),
            max_sequences=credit.max_sequences,
            kv_tokens=credit.kv_tokens,
            generated_tokens=self._rate.total_tokens,
            tokens_per_second=round(self._rate.sample(time.monotonic()), 3),
            pulled=dict(self._pull_loops.pulled),
            pulled_own=self._pull_loops.pulled_own,
            draining=self.is_draining or self._is_leaving,
            reclaiming=self.is_reclaimed,
            drained=self._drained_counts,
            resident=self._engine_holder.driver is not None,
            type=self.identity.type,
            not_loaded=dict(islice(self.not_loaded.items(), _MAX_NOT_LOADED)),
            room=self._free_by_priority() if credit.preempts else {},
            load=self.load,
        )

    def _build_full_heartbeat(self) -> Heartbeat:
        """Return `build_heartbeat` with the progress of requests and the deliveries received.

        Each call takes the next turn of the progress report, so that only the heartbeats that are
        sent to the dispatcher may be built by it.
        """
        now = time.monotonic()
        progress = self._progress.select_due(self._token_counts, now)
        return replace(
            self.build_heartbeat(),
            progress=progress,
            taken=self._recently_received(now, bool(progress)),
        )

    def _recently_received(self, now: float, repeat: bool) -> list[str]:
        """Return the reply subjects of deliveries since the last heartbeat, the newest 1,024.

        With `repeat` those of the last second, and all of them for a second after a leader asked.
        """
        since = self._last_heartbeat_at if not repeat else now - _REPORT_RECEIVED_SECONDS
        if self._heartbeat.last_muster_at > now - _REPORT_RECEIVED_SECONDS:
            since = -inf
        self._last_heartbeat_at = now
        attempts = self._attempts.values()
        return [each.delivery.reply for each in attempts if each.received_at >= since][
            -_MAX_RECEIVED_REPORTED:
        ]

    def _heartbeat_interval(self, seconds: float) -> float:
        """Return the seconds until the next heartbeat: fewer while there is progress to report."""
        return min(seconds, PROGRESS_REPORT_SECONDS) if self._attempts else seconds

    def _free_by_priority(self) -> dict[str, tuple[int, int]]:
        """Return the free sequences and KV tokens for each priority."""
        return {
            str(p): self.credit.free_capacity(p) if self._announces_room else (0, 0)
            for p in Priority
        }

    def _token_counts(self) -> TokenCounts:
        return [
            (attempt.delivery.seq, attempt.stored_tokens) for attempt in self._attempts.values()
        ]

    async def _watch_engine(self, driver: Driver) -> None:
        """Wait until the engine ends; if it has failed, release its work at once."""
        if failure := await wait_for_failure(driver, self.identity.model, self._engine_timeout):
            await self._handle_engine_failure(driver, failure)

    async def _handle_engine_failure(
        self, driver: Driver, failure: EngineCrashed | EngineHung
    ) -> None:
        self._engine_holder.abandon()
        self._detach_engine()
        self.set_accepting(False)
        attempts = list(self._attempts.values())
        culprit_known = any(attempt.is_quarantined for attempt in attempts)
        for attempt in attempts:
            attempt.handle_engine_failure(str(failure), culprit_known)
        if isinstance(failure, EngineCrashed):
            await driver.closed  # from here on its memory is free
        self.failure = failure
        self.on_change()


async def _store_dead_letter(broker: Broker, delivery: Delivery) -> None:
    try:
        await dead_letters.dead_letter_malformed(broker, delivery)
    except (BrokerUnavailable, StoreRefused) as error:  # redelivered after its ack wait
        log.warning("dead_letter_not_stored", seq=delivery.seq, reason=str(error))


async def _nak(delivery: Delivery) -> None:
    try:
        await delivery.nak()
    except BrokerUnavailable as error:  # redelivered after its ack wait
        log.warning("work_not_returned", seq=delivery.seq, reason=str(error))
