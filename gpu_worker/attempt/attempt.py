"""One worker's try at one request: claims its log, runs it, stores its tokens, acknowledges it."""

import asyncio
import time
from asyncio import Event
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from gpu_worker.attempt.finished_logs import FinishedLogs
from gpu_worker.attempt.output_buffer import OutputBuffer
from gpu_worker.attempt.poison_guard import PoisonGuard
from gpu_worker.attempt.stage_timer import DeadlineTimer, StageTimer
from gpu_worker.attempt.start_quarantine import StartQuarantine
from gpu_worker.attempt.terminals import (
    FinishedRequest,
    StopReason,
    build_terminal,
)
from gpu_worker.compute_meter import ModelMeter
from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.engine_holder import EngineHolder
from gpu_worker.identity import WorkerIdentity
from streams import messages, subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.broker.pull_loop import Delivery
from streams.errors import BrokerUnavailable
from streams.headers import MESSAGE_ID, Envelope
from streams.ledger_records import build_ledger_record
from streams.messages import LedgerRecord, Request, TokenUsage
from streams.records import dead_letters
from streams.records.attempt_history import AttemptHistory, NoteKind
from streams.records.jobs.job_item import JobItem
from streams.records.log_contents import LogContents, RequestEnd
from streams.records.stored_ends import stored_end_of
from streams.records.token_log import (
    Fenced,
    TokenLog,
    never_settled,
    write_ledger_record,
)
from streams.records.token_log_cache import RecordPage, RecordsQuery
from streams.subjects import LogAddress, Priority

RETRY_DELAY_SECONDS = 0.5  # before a request whose attempt failed is tried again
# Between a quarantined attempt's checks whether a later attempt has fenced it
FENCE_CHECK_SECONDS = 1.0
# For a worker that was only cut off to report, before its silence counts as the request's fault
LAST_WORKER_GRACE_SECONDS = 3.0
# A record of the log of a job's line has so many tokens, or comes so late
GATHER_TOKENS, GATHER_SECONDS = 64, 0.5


class Attempt:
    """One worker's try at one request, from the delivery of its work to the acknowledgement.

    The model server makes one for each request that the broker delivers and awaits `run` once,
    which does all of the work. It passes the engine's outputs to `receive_output` and may end the
    attempt early by `stop`. The attempt is over when the request's last record is stored, or when
    another attempt takes over.
    """

    def __init__(
        self,
        broker: Broker,
        engine_holder: EngineHolder,
        start_quarantine: StartQuarantine,
        delivery: Delivery,
        envelope: Envelope,
        identity: WorkerIdentity,
        finished_logs: FinishedLogs,
        meter: ModelMeter,
    ) -> None:
        self.envelope = envelope
        self.delivery, self.received_at = delivery, time.monotonic()
        self.may_be_reassigned = False  # the broker may have given the work to another worker
        self._broker, self._engine_holder = broker, engine_holder
        self._identity, self._finished_logs, self._meter = identity, finished_logs, meter
        address = LogAddress(envelope.tenant, envelope.route, envelope.request_id)
        self._stored_end = stored_end_of(broker, envelope)
        # The log of a line is read by nobody, and removed behind its result
        self._is_line = subjects.is_line(envelope.request_id)
        item = envelope.item if self._is_line else None
        is_settled = JobItem(broker, envelope, item).is_settled if item else never_settled
        self._token_log = TokenLog(
            broker, address, identity.shards, is_settled, encoding=envelope.encoding
        )
        self._poison_guard = PoisonGuard(broker, address, identity.worker, start_quarantine)
        # Recorded for this attempt if it does not end the request
        self._outcome: tuple[NoteKind, str] = ("released", "")
        self._final_history = AttemptHistory()  # of all attempts, if this one is the last
        self._buffer = OutputBuffer()
        self._wake = Event()
        self._stop_reason: StopReason | None = None
        self._timer = StageTimer(broker.clock.now)
        self._tokens = self._characters = self._rows = 0  # stored, by all attempts
        self._generated_before = 0  # tokens, by earlier attempts, of which some may be lost
        self._had_output = False  # an earlier attempt has stored some, perhaps at an unknown time
        self._first_output_at = 0  # of all attempts, in epoch ms
        self._was_warm: bool | None = None
        self._generated = 0  # tokens, by this attempt
        self._compute_ns = 0  # of the engine's time, by this attempt
        self._recorded_ns = 0  # of that, what its ledger record has
        self._number = 1
        self._in_engine = False
        self._logger = structlog.get_logger().bind(
            request_id=envelope.request_id, tenant=envelope.tenant
        )

    def receive_output(self, output: Output) -> None:
        """Take the engine's next output for this request; `run` stores it later.

        Returns at once. Must be called on the event loop.
        """
        if not self._timer.first_output_at_ms:
            self._timer.mark_first_output()
            if not self._had_output:
                self._first_output_at = round(self._timer.first_output_at_ms)
        self._generated += len(output.tokens)
        self._buffer.add(output)
        if self._buffer.final_output:
            self._in_engine = False
        self._wake.set()

    @property
    def is_active(self) -> bool:
        """True until the attempt is told to stop, by `stop` or another method."""
        return self._stop_reason is None

    def stop(self, reason: StopReason) -> None:
        """Tell the attempt to end early; returns at once, and `run` ends it.

        The engine drops the sequence by its next step. Only the first call counts. If the engine
        has finished the request by then, it ends as finished. Otherwise `RELEASED` leaves it to
        other workers, and any other reason ends it for the client.
        """
        if self._stop_reason is None:
            self._stop_reason = reason
            self._engine_holder.cancel(self.envelope.request_id)
            self._wake.set()

    def read_cached_log(self, query: RecordsQuery) -> RecordPage:
        """Return the queried records of this request's token log, from the worker's memory.

        Only records that this attempt knows to be stored are returned; the page may be empty.
        """
        return self._token_log.cache.read_page(query)

    @property
    def is_quarantined(self) -> bool:
        """True while this attempt starts alone in the engine: a failure now is its own fault."""
        return self._poison_guard.is_quarantined

    def handle_engine_failure(self, error: str, culprit_known: bool) -> None:
        """Stop this attempt because its engine has failed with `error`; returns at once.

        `culprit_known` means that some attempt was quarantined in the engine (starting alone), and
        so was to blame. That attempt ends its request with the error `attempts_exhausted`. The
        others return their work for other workers; unless the culprit is known, each that was in
        the engine is recorded as failed.
        """
        if self.is_quarantined:
            self._final_history = self._poison_guard.build_poison_history(error)
            self.stop(StopReason.EXHAUSTED)
            return
        if self._in_engine and not culprit_known:
            self._outcome = "failed", error
        self.stop(StopReason.RELEASED)

    def abandon(self) -> None:
        """Stop this attempt without acknowledging its work, which another worker may have by now.

        Returns at once. Outputs made so far are still stored if the broker allows it, which also
        restores a log that the broker has lost.
        """
        self.may_be_reassigned = True
        self.stop(StopReason.RELEASED)

    def accept_redelivery(self, delivery: Delivery) -> None:
        """Acknowledge `delivery` in place of the earlier delivery of the same work.

        The broker redelivers work whose ack wait has run out. From now on the work counts as this
        worker's again, and `extend_ack_wait` takes effect again.
        """
        self.delivery, self.received_at, self.may_be_reassigned = delivery, time.monotonic(), False

    async def extend_ack_wait(self) -> None:
        """Tell the broker that the work is in progress, which restarts its ack wait.

        Does nothing once the broker may have given the work to another worker. Raises
        `BrokerUnavailable` if the message cannot be sent.
        """
        if not self.may_be_reassigned:
            await self.delivery.in_progress()

    async def run(self) -> FinishedRequest | None:
        """Serve the request to its end, then acknowledge the work; call it once.

        Returns the finished request when its last record and its usage record are stored. Returns
        None when this attempt does not end the request: another attempt has claimed the token log,
        it was released, it failed (the work is returned and tried again), it lost the broker (the
        work comes back after its ack wait), or the log had ended before. Raises `BrokerUnavailable`
        if the work can be neither acknowledged nor returned.
        """
        try:
            finished = await self._serve()
        except Fenced as error:
            self.may_be_reassigned = True
            self._logger.warning("attempt_fenced", reason=str(error))
            await self._remove_from_engine()
            await self._poison_guard.record_outcome("released")
            return None
        except (BrokerUnavailable, StoreRefused) as error:  # redelivered after its ack wait
            self._logger.error("attempt_lost_broker", reason=str(error))
            await self._remove_from_engine()
            return None
        except Exception as error:  # one request's fault: tried again until it is exhausted
            self._logger.exception("attempt_failed")
            await self._remove_from_engine()
            await self._poison_guard.record_outcome("broke", repr(error))
            await self.delivery.nak(RETRY_DELAY_SECONDS)
            return None
        await self._remove_from_engine()
        if self._stop_reason is StopReason.RELEASED and finished is None:
            await self._poison_guard.record_outcome(*self._outcome)
            if not self.may_be_reassigned:
                await self.delivery.nak()
        else:
            await self.delivery.ack()  # only now: a crash before this line repeats, never loses
        return finished

    def count_lost_time(self) -> None:
        """Count as lost what the engine has spent on this attempt and no ledger record has."""
        self._take_compute_time()
        self._meter.lose(self._compute_ns - self._recorded_ns)
        self._recorded_ns = self._compute_ns

    def _take_compute_time(self) -> int:
        self._compute_ns += self._meter.take(self.envelope.request_id)
        return self._compute_ns

    async def _remove_from_engine(self) -> None:
        """Wait until the engine has dropped the sequence, and let others start.

        Outputs name the request, not the attempt: only then may a new attempt at it begin here.
        """
        if self._in_engine:
            await self._engine_holder.cancel_and_wait(self.envelope.request_id)
            self._in_engine = False
        self._poison_guard.release_start()

    async def _serve(self) -> FinishedRequest | None:
        """Claim the log and run the request; None if another attempt has ended or will end it."""
        identity = self._identity
        if self._is_line and (end := await self._read_stored_end()):
            await self._repeat_ledger_record(end)
            return None
        before = await self._token_log.claim(identity.model, identity.version, identity.worker)
        self._number = before.attempts + 1
        end = before.end
        if end is None and (end := await self._read_stored_end()):
            await self._token_log.append(end.terminal)
        if end is not None:
            await self._poison_guard.load_history(before)
            await self._repeat_ledger_record(end)
            return None
        kept = LogContents() if before.is_truncated else before
        self._tokens, self._rows, self._characters = len(kept.tokens), kept.rows, len(kept.text)
        self._generated_before = before.generated_tokens
        self._had_output, self._first_output_at = before.has_output, before.first_output_at
        await self._poison_guard.load_history(before)
        with self._deadline_timer():
            await self._wait_for_last_worker(before)
            if self._poison_guard.history.is_poison:
                self._final_history = self._poison_guard.history
                self.stop(StopReason.EXHAUSTED)
            await self._start_in_turn(kept)
            return await self._store_outputs()

    async def _read_stored_end(self) -> RequestEnd | None:
        """Return the end that an earlier delivery of the work has stored, if any.

        Work that a dispatcher has put back into the queue is another message, with another id.
        """
        message_id = self.delivery.headers.get(MESSAGE_ID)
        is_first = self.delivery.num_delivered == 1 and message_id == self.envelope.request_id
        if self._stored_end is None or is_first:
            return None
        return await self._stored_end.read_end()

    async def _wait_for_last_worker(self, before: LogContents) -> None:
        """Wait for the last attempt's worker to report, if its silence alone makes this poison.

        It may be alive and only cut off. Waits up to three seconds.
        """
        give_up_at = time.monotonic() + LAST_WORKER_GRACE_SECONDS
        while (
            self._stop_reason is None
            and self._poison_guard.history.is_poison_unconfirmed
            and time.monotonic() < give_up_at
        ):
            await asyncio.sleep(FENCE_CHECK_SECONDS / 4)
            await self._poison_guard.load_history(before)

    def _deadline_timer(self) -> DeadlineTimer:
        seconds = self._broker.clock.seconds_until(self.envelope.deadline)
        return DeadlineTimer(seconds, lambda: self.stop(StopReason.EXPIRED))

    async def _start_in_turn(self, before: LogContents) -> None:
        """Wait for a turn to start, then add what is left of the request to the engine.

        Adds nothing if the attempt was stopped meanwhile.
        """
        if await self._wait_for_turn():
            await self._poison_guard.record_start(self._tokens + self._rows)
            if self._stop_reason is None:
                self._add_to_engine(before)

    async def _wait_for_turn(self) -> bool:
        """Wait until the start quarantine admits this attempt; False if it was stopped before."""
        turn = Event()

        def begin() -> None:
            turn.set()
            self._wake.set()

        if self._stop_reason is None:
            self._poison_guard.request_start(begin)
        while self._stop_reason is None and not turn.is_set():
            self._wake.clear()
            await self._wake.wait()
        return self._stop_reason is None

    def _add_to_engine(self, before: LogContents) -> None:
        request, goal = Request.unpack(self.delivery.data), self.first_output_goal
        inputs = request.inputs[before.rows :]
        if request.inputs and not inputs:
            self.receive_output(Output(self.envelope.request_id, finish="stop"))
            return
        self._in_engine = True
        self._was_warm = self._engine_holder.driver is not None
        self._engine_holder.add(
            Sequence(
                request_id=self.envelope.request_id,
                prompt=messages.unpack_tokens(request.prompt),
                sampling=request.sampling,
                generated=before.tokens,
                text=before.text,
                inputs=[messages.unpack_tokens(tokens) for tokens in inputs],
                splits=request.splits[before.rows :],
                dimensions=request.dimensions,
                deadline=self._to_monotonic(self.envelope.deadline),
                goal=None if goal is None else self._to_monotonic(goal),
                adapter=request.adapter,
                priority=self.priority,
                tenant=self.envelope.tenant,
            )
        )

    def _to_monotonic(self, at_ms: float) -> float:
        """Return epoch milliseconds as monotonic seconds, the only clock that an engine knows."""
        return time.monotonic() + self._broker.clock.seconds_until(at_ms)

    @property
    def stored_tokens(self) -> int:
        """Number of tokens stored in the request's log so far, by all attempts together."""
        return self._tokens

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the attempt ends if the request generates to its token limit at this pace.

        None while no pace is known: before the first output, and below two tokens.
        """
        left = self.envelope.cost - self.envelope.prompt_tokens - self._tokens
        return self._timer.estimate_seconds(left, self._generated)

    @property
    def priority(self) -> Priority:
        """Priority at which the work was dispatched; the client's own may be higher."""
        return subjects.parse_work(self.delivery.subject).priority

    @property
    def first_output_goal(self) -> float | None:
        """Time by which the first output is due by the model's latency goal, in epoch milliseconds.

        The goal is that of the priority which the client asked for, as it was when the request was
        accepted; None if the model had no such goal.
        """
        ms = self.envelope.goal_ms
        return None if ms is None else self.envelope.accepted + ms

    async def _store_outputs(self) -> FinishedRequest | None:
        """Append the engine's outputs, one append in flight, until it is done or stopped.

        Returns the finished request, or None if the attempt was released before its end.
        """
        while True:
            await self._wait_for_output()
            if self._is_line:
                await self._gather_output()
            self._wake.clear()
            batch, self._buffer = self._buffer, OutputBuffer()
            await self._append(batch)
            await self._poison_guard.record_progress(self._tokens + self._rows)
            end = batch.final_output
            if self._stop_reason is StopReason.RELEASED and (not end or end.finish == "cancelled"):
                return None
            if self._stop_reason or end:
                return await self._finish(end)

    async def _wait_for_output(self) -> None:
        """Wait until there is an output or a reason to stop.

        A quarantined attempt checks every second whether a later one has claimed the log, and
        raises `Fenced` then: a worker that is only cut off may be taken for dead, and its request
        must not be blamed for that.
        """
        while self.is_quarantined and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(FENCE_CHECK_SECONDS):
                    await self._wake.wait()
                return
            with suppress(BrokerUnavailable):  # unknown for now: the next check may tell
                await self._token_log.check_not_fenced()
        await self._wake.wait()

    async def _gather_output(self) -> None:
        """Wait until there is as much to append as one record of a line's log should have.

        Nobody reads such a log while it grows.
        """
        until = time.monotonic() + GATHER_SECONDS
        while (
            not (self._buffer.final_output or self._stop_reason)
            and self._buffer.token_count < GATHER_TOKENS
            and time.monotonic() < until
        ):
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    await self._wake.wait()

    async def _append(self, batch: OutputBuffer) -> None:
        for chunk in batch.iter_chunks(self._tokens, self._characters):
            await self._append_output(chunk)
            self._tokens += chunk["count"]
            self._characters += len(chunk["text"])
        for record in batch.iter_results(self._rows):
            await self._append_output(record)
        self._rows += len(batch.vectors)

    async def _append_output(self, record: dict[str, Any]) -> None:
        """Append a record with output; the request's first one says when it was made."""
        is_first, self._had_output = not self._had_output, True
        at = {"at": self._first_output_at} if is_first else {}
        await self._token_log.append(record | at)

    async def _finish(self, end: Output | None) -> FinishedRequest:
        """Store the terminal and the ledger record, and a dead letter first if it is exhausted."""
        timing = self._timer.stage_durations(self.envelope)
        failures = len(self._final_history.failures)
        terminal: Mapping[str, Any] = build_terminal(
            end, self._stop_reason, self._usage(end), timing, failures
        )
        if terminal.get("code") == StopReason.EXHAUSTED.value:
            await dead_letters.store_dead_letter(
                self._broker, self.delivery, self.envelope, terminal["code"], self._final_history
            )
        if self._stored_end:
            stored = self._token_log.cache.records
            terminal = await self._stored_end.store_result(stored, terminal)
        record = self._ledger_record(terminal, self._number)
        await self._token_log.append(terminal)
        if not self._is_line:
            self._finished_logs.add(self._token_log.to_finished(), time.monotonic())
        await write_ledger_record(self._broker, record)
        self._recorded_ns = record.compute_ns
        self._logger.info(
            "request_finished",
            outcome=record.outcome,
            attempt=self._number,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            **terminal.get("timing", {}),
        )
        return FinishedRequest(record, timing)

    def _usage(self, end: Output | None) -> TokenUsage:
        if end and end.usage:
            return messages.openai_usage(end.usage.prompt_tokens, end.usage.completion_tokens)
        cached = end.cached if end else 0
        generated = max(self._tokens, self._generated_before)  # the client may have seen them all
        return messages.openai_usage(self.envelope.prompt_tokens, generated, cached)

    async def _repeat_ledger_record(self, end: RequestEnd) -> None:
        """Write the ledger record of a request that has ended already.

        The attempt that ended it may have died before it wrote the ledger record.
        """
        self._first_output_at = end.first_output_at
        record = self._ledger_record(end.terminal, max(1, end.attempts))
        await write_ledger_record(self._broker, record)

    def _ledger_record(self, terminal: Mapping[str, Any], attempts: int) -> LedgerRecord:
        now_ms = self._broker.clock.now_ms()
        earlier = self._poison_guard.history.summarize()
        return build_ledger_record(
            self.envelope,
            self._identity.model,
            terminal,
            now_ms,
            version=self._identity.version,
            worker=self._identity.worker,
            attempts=attempts,
            first=self._first_output_at,
            priority=self.envelope.priority or self.priority.value,
            earlier_attempts=[each for each in earlier if each["attempt"] < attempts],
            warm=self._was_warm,
            worker_ms=max(0, round(now_ms - self._timer.pulled_at_ms)),
            worker_type=self._identity.type,
            worker_price=self._identity.price,
            compute_ns=self._take_compute_time(),
        )
