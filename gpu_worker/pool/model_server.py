"""One model version served by this worker: its engine, its pulls, its attempts, its credit."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import structlog

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.attempt.finished_logs import FinishedLogs, restore_log
from gpu_worker.attempt.start_queue import StartQueue
from gpu_worker.attempt.terminals import FinishedRequest, StopReason
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
from gpu_worker.pool.handover import Handover
from gpu_worker.pool.heartbeat import HeartbeatSender
from gpu_worker.pool.progress_report import PROGRESS_REPORT_SECONDS, ProgressReporter, TokenCounts
from gpu_worker.pool.pull_loops import PullLoops
from streams.broker.connection import Broker, StoreRefused
from streams.broker.pull_loop import Delivery
from streams.broker.retry import wait_for_tasks
from streams.errors import BrokerUnavailable
from streams.messages import Heartbeat
from streams.records import dead_letters
from streams.records.token_log_cache import RecordPage, RecordsQuery
from streams.subjects import Priority

log = structlog.get_logger()

_HANDOVER_CHECK_SECONDS = 0.1  # between two looks at who could take over what
# For which beats tell that something was taken: one of them may be lost
_REPORT_RECEIVED_SECONDS = 1.0
_MAX_RECEIVED_REPORTED = 1024  # of which one beat tells
_RELEASE_SECONDS = 2.0  # for what was stopped at the end of draining to be given back
OnFinished = Callable[[FinishedRequest], None]


class ModelServer:
    """Serves one model version until told to drain.

    Its engine comes (`put`) and goes (`take`). While there is none it announces room for one
    request of up to `context` tokens, which will wait for an engine. `stirred` is called when it
    begins or ends a request, and when its engine has failed.
    """

    def __init__(
        self,
        broker: Broker,
        who: WorkerIdentity,
        context: int,
        observe: OnFinished,
        engine_timeout_seconds: float,
    ) -> None:
        self.identity = who
        self._capacity_without_engine = FreeCapacity(1, context)
        self.credit = Credit(self._capacity_without_engine)
        self._broker, self._on_finished = broker, observe
        self._throttled: Throttled | None = None
        self._stats_source: ReportsStats | None = None
        self._engine_timeout = engine_timeout_seconds
        self._engine_holder = EngineHolder(self._route_outputs, who.model)
        self._start_queue = StartQueue()
        self._finished_logs = FinishedLogs()
        self._attempts: dict[str, Attempt] = {}
        self._ack_keepalive = AckKeepalive(broker, self._attempts)
        self._attempt_tasks: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._pull_loops = PullLoops(broker, who, self._pull_limit, self._accept_delivery)
        self._heartbeat = HeartbeatSender(broker, who, self._build_full_heartbeat)
        self._rate = TokenRate(time.monotonic())
        self._progress = ProgressReporter()
        self._last_heartbeat_at = -inf
        self._is_open = True
        self.is_draining = False
        self.failure: EngineCrashed | EngineHung | None = None  # of the engine it had last
        self.on_change: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        return not self._attempts

    @property
    def stats(self) -> EngineStats | None:
        """What its engine counts, while it has one that does."""
        return self._stats_source.stats if self._stats_source else None

    @property
    def accepts_work(self) -> bool:
        return self._is_open and not self.is_draining

    def set_accepting(self, is_open: bool) -> None:
        """Whether to take new work. Idempotent."""
        if is_open != self._is_open:
            self._is_open = is_open
            if not is_open:
                self._pull_loops.withdraw()
            self._announce_credit()

    def attach_engine(self, engine: Engine) -> None:
        """Run a loaded engine, first over what has waited for it."""
        self.failure = None
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
        """Stop the engine and give back its memory."""
        self._detach_engine()
        await self._engine_holder.stop()

    def _detach_engine(self) -> None:
        self._throttled = self._stats_source = self._heartbeat.cache = None
        self.credit.resize(self._capacity_without_engine)
        self._heartbeat.send_soon()

    async def release_all(self) -> None:
        """Give back everything that is held, so that another worker need not wait."""
        for attempt in list(self._attempts.values()):
            attempt.stop(StopReason.RELEASED)
        await wait_for_tasks(self._attempt_tasks, _RELEASE_SECONDS)

    async def run(self, beat_seconds: float, ack_wait_seconds: float) -> None:
        """Pull, run and beat until cancelled."""
        await self._heartbeat.listen()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._pull_loops.start(tasks, ack_wait_seconds)
            tasks.create_task(
                self._heartbeat.run(partial(self._heartbeat_interval, beat_seconds)), name="beat"
            )
            tasks.create_task(self._ack_keepalive.run(beat_seconds, ack_wait_seconds), name="hold")
            tasks.create_task(
                self._ack_keepalive.abandon_when_cut_off(ack_wait_seconds), name="let-go"
            )
            if driver := self._engine_holder.driver:
                tasks.create_task(self._watch_engine(driver), name="engine")

    def cancel(self, tenant: str, request_id: str) -> None:
        """The client wants no more of it. Idempotent; unknown requests are somebody else's."""
        attempt = self._attempts.get(request_id)
        if attempt and attempt.envelope.tenant == tenant:
            attempt.stop(StopReason.CANCELLED)

    def has_request(self, tenant: str, request_id: str) -> bool:
        """Whether the request runs here, or has ended here: then a lost log is put back."""
        running = self._attempts.get(request_id)
        if ended := self._finished_logs.get(tenant, request_id, time.monotonic()):
            assert self._tasks
            self._tasks.create_task(restore_log(ended), name=f"put-back-{request_id}")
        return bool(ended or (running and running.envelope.tenant == tenant))

    def read_cached_log(self, question: RecordsQuery) -> RecordPage | None:
        """What is stored of a log that is written here; None of any other."""
        attempt = self._attempts.get(question.request_id)
        own = attempt and attempt.envelope.tenant == question.tenant
        return attempt.read_cached_log(question) if attempt and own else None

    async def drain(self, seconds_left: Callable[[], float]) -> int:
        """Take nothing new, and be empty by the time that none is left; how many were handed over.

        What ends in time is finished here. The rest, first what has not begun, goes to other
        workers of the pool as soon as they have room, and at the end in any case.
        """
        self.is_draining = True
        self._heartbeat.send_soon()
        await self._pull_loops.stop()
        handed_over = 0
        async with Handover(self._broker, self.identity) as others:
            while self._attempts and (left := seconds_left()):
                for attempt in others.choose_attempts(self._attempts.values(), left):
                    attempt.stop(StopReason.RELEASED)
                    handed_over += 1
                await wait_for_tasks(self._attempt_tasks, min(left, _HANDOVER_CHECK_SECONDS))
        handed_over += sum(attempt.is_active for attempt in self._attempts.values())
        await self.release_all()
        return handed_over

    def _pull_limit(self, priority: Priority) -> int:
        self._update_concurrency_limit()
        return self.credit.pull_batch_size(priority) if self.accepts_work else 0

    def _announce_credit(self) -> None:
        """Credit has grown, or may have."""
        self._heartbeat.send_soon()
        self._pull_loops.wake()

    def _update_concurrency_limit(self) -> None:
        """Credit is what a throttled engine has of the moment; asked at each pull and beat."""
        if self._throttled:
            before, self.credit.concurrency_limit = (
                self.credit.concurrency_limit,
                self._throttled.concurrency_limit(),
            )
            if self.credit.concurrency_limit > before:
                self._announce_credit()

    def _update_credit_use(self) -> None:
        """Who has generated a part of what it may needs less room for the rest."""
        for request_id, attempt in self._attempts.items():
            envelope = attempt.envelope
            self.credit.update_generated(
                request_id, envelope.prompt_tokens, envelope.cost, attempt.stored_tokens
            )

    def _accept_delivery(self, delivery: Delivery) -> None:
        assert self._tasks
        if self.is_draining:
            self._tasks.create_task(_nak(delivery), name=f"return-{delivery.seq}")
            return
        envelope = dead_letters.parse_work_envelope(delivery)
        if envelope is None:
            self._tasks.create_task(
                _store_dead_letter(self._broker, delivery), name=f"bury-{delivery.seq}"
            )
            return
        if running := self._attempts.get(envelope.request_id):
            running.accept_redelivery(
                delivery
            )  # our own work again, after its ack wait: keep going
            return
        parts = (
            self._broker,
            self._engine_holder,
            self._start_queue,
            delivery,
            envelope,
            self.identity,
            self._finished_logs,
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
        serving = self._tasks.create_task(self._run_attempt(attempt), name=f"attempt-{request_id}")
        self._attempt_tasks.add(serving)
        serving.add_done_callback(self._attempt_tasks.discard)

    async def _run_attempt(self, attempt: Attempt) -> None:
        request_id = attempt.envelope.request_id
        try:
            if finished := await attempt.run():
                self._on_finished(finished)
        except BrokerUnavailable as error:
            log.warning("work_not_settled", request_id=request_id, reason=str(error))
        finally:
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
        """This worker's credit of the moment."""
        self._update_concurrency_limit()
        self._update_credit_use()
        credit = self.credit
        return Heartbeat(
            worker=self.identity.worker,
            model=self.identity.model,
            version=self.identity.version,
            free_sequences=credit.free_sequences if self.accepts_work else 0,
            free_tokens=credit.free_tokens if self.accepts_work else 0,
            running=min(credit.held, credit.max_sequences),
            waiting=max(0, credit.held - credit.max_sequences),
            max_sequences=credit.max_sequences,
            kv_tokens=credit.kv_tokens,
            generated_tokens=self._rate.total_tokens,
            tokens_per_second=round(self._rate.sample(time.monotonic()), 3),
            pulled=dict(self._pull_loops.pulled),
            pulled_own=self._pull_loops.pulled_own,
            draining=self.is_draining,
            resident=self._engine_holder.driver is not None,
            room=self._free_by_priority() if credit.preempts else {},
        )

    def _build_full_heartbeat(self) -> Heartbeat:
        """The same with how far requests have come, which takes turns: for the dispatcher alone."""
        now = time.monotonic()
        progress = self._progress.select_due(self._token_counts, now)
        return replace(
            self.build_heartbeat(),
            progress=progress,
            taken=self._recently_received(now, bool(progress)),
        )

    def _recently_received(self, now: float, again: bool) -> list[str]:
        """What has come since the last beat, or lately; for a new leader everything."""
        since = self._last_heartbeat_at if not again else now - _REPORT_RECEIVED_SECONDS
        if self._heartbeat.last_muster_at > now - _REPORT_RECEIVED_SECONDS:
            since = -inf
        self._last_heartbeat_at = now
        attempts = self._attempts.values()
        return [each.delivery.reply for each in attempts if each.received_at >= since][
            -_MAX_RECEIVED_REPORTED:
        ]

    def _heartbeat_interval(self, seconds: float) -> float:
        """Until the next beat: less while there is progress to tell of."""
        return min(seconds, PROGRESS_REPORT_SECONDS) if self._attempts else seconds

    def _free_by_priority(self) -> dict[str, tuple[int, int]]:
        return {
            str(p): self.credit.free_capacity(p) if self.accepts_work else (0, 0) for p in Priority
        }

    def _token_counts(self) -> TokenCounts:
        return [
            (attempt.delivery.seq, attempt.stored_tokens) for attempt in self._attempts.values()
        ]

    async def _watch_engine(self, driver: Driver) -> None:
        """Until the engine goes; when it has failed, its work is given back at once."""
        if failure := await wait_for_failure(driver, self.identity.model, self._engine_timeout):
            await self._handle_engine_failure(driver, failure)

    async def _handle_engine_failure(
        self, driver: Driver, failure: EngineCrashed | EngineHung
    ) -> None:
        self._engine_holder.abandon()
        self._detach_engine()
        self.set_accepting(False)
        attempts = list(self._attempts.values())
        culprit = any(attempt.is_quarantined for attempt in attempts)
        for attempt in attempts:
            attempt.handle_engine_failure(str(failure), culprit)
        if isinstance(failure, EngineCrashed):
            await driver.closed  # its memory is free
        self.failure = failure
        self.on_change()


async def _store_dead_letter(broker: Broker, delivery: Delivery) -> None:
    try:
        await dead_letters.dead_letter_malformed(broker, delivery)
    except (BrokerUnavailable, StoreRefused) as error:  # then its ack wait brings it back
        log.warning("dead_letter_not_stored", seq=delivery.seq, reason=str(error))


async def _nak(delivery: Delivery) -> None:
    try:
        await delivery.nak()
    except BrokerUnavailable as error:  # then its ack wait brings it back
        log.warning("work_not_returned", seq=delivery.seq, reason=str(error))
