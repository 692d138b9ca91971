"""One worker's try at one request: claim, run, store every token, end, acknowledge."""

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
from gpu_worker.attempt.start_queue import StartQueue
from gpu_worker.attempt.terminals import (
    FinishedRequest,
    StopReason,
    build_ledger_record,
    build_terminal,
)
from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.engine_holder import EngineHolder
from gpu_worker.identity import WorkerIdentity
from streams import messages, subjects
from streams.broker.connection import Broker, StoreRefused
from streams.broker.pull_loop import Delivery
from streams.errors import BrokerUnavailable
from streams.headers import Envelope
from streams.messages import LedgerRecord, Request, TokenUsage
from streams.records import dead_letters
from streams.records.attempt_history import AttemptHistory, NoteKind
from streams.records.token_log import Fenced, LogContents, TokenLog, write_ledger_record
from streams.records.token_log_cache import RecordPage, RecordsQuery
from streams.subjects import LogAddress, Priority

RETRY_DELAY_SECONDS = 0.5  # before a request whose attempt failed is tried again
# Between an attempt's looks, while it is on trial, whether it was overtaken
FENCE_CHECK_SECONDS = 1.0
# For a worker that was only cut off to say so, before its silence convicts
LAST_WORKER_GRACE_SECONDS = 3.0


class Attempt:
    """Owns one delivery until its terminal is stored, or another attempt has taken over.

    `accept` takes the engine's outputs; `run` does the rest and returns what was finished, or None
    when somebody else ends the request.
    """

    def __init__(
        self,
        broker: Broker,
        mount: EngineHolder,
        starts: StartQueue,
        delivery: Delivery,
        envelope: Envelope,
        who: WorkerIdentity,
        ended: FinishedLogs,
    ) -> None:
        self.envelope = envelope
        self.delivery, self.received_at = delivery, time.monotonic()
        self.may_be_reassigned = False  # the broker may have given the work to somebody else
        self._engine_holder, self._identity, self._broker, self._finished_logs = (
            mount,
            who,
            broker,
            ended,
        )
        address = LogAddress(envelope.tenant, envelope.route, envelope.request_id)
        self._token_log = TokenLog(broker, address, who.shards)
        self._poison_guard = PoisonGuard(broker, address, who.worker, starts)
        self._outcome: tuple[NoteKind, str] = (
            "released",
            "",
        )  # of this attempt, if it ends nothing
        self._final_history = AttemptHistory()  # all attempts, if it was the last one
        self._buffer = OutputBuffer()
        self._wake = Event()
        self._stop_reason: StopReason | None = None
        self._timer = StageTimer(broker.clock.now)
        self._tokens = self._characters = self._rows = 0  # stored, by all attempts
        self._generated_before = 0  # tokens, by earlier ones, of which some may be lost
        self._generated = 0  # tokens, by this one
        self._number = 1
        self._in_engine = False
        self._logger = structlog.get_logger().bind(
            request_id=envelope.request_id, tenant=envelope.tenant
        )

    def receive_output(self, output: Output) -> None:
        """The engine's next output for this request; called on the loop."""
        if not self._timer.first_output_at_ms:
            self._timer.mark_first_output()
        self._generated += len(output.tokens)
        self._buffer.add(output)
        if self._buffer.final_output:
            self._in_engine = False
        self._wake.set()

    @property
    def is_active(self) -> bool:
        """Whether nobody has told it to stop."""
        return self._stop_reason is None

    def stop(self, why: StopReason) -> None:
        """End early: the engine drops the sequence by its next step. The first reason stays."""
        if self._stop_reason is None:
            self._stop_reason = why
            self._engine_holder.cancel(self.envelope.request_id)
            self._wake.set()

    def read_cached_log(self, question: RecordsQuery) -> RecordPage:
        """What it knows to be stored of its log."""
        return self._token_log.cache.read_page(question)

    @property
    def is_quarantined(self) -> bool:
        """Whether it is to blame if the engine fails now."""
        return self._poison_guard.is_quarantined

    def handle_engine_failure(self, error: str, culprit: bool) -> None:
        """The engine has failed; `culprit` says that somebody was on trial there."""
        if self.is_quarantined:
            self._final_history = self._poison_guard.build_poison_history(error)
            self.stop(StopReason.EXHAUSTED)
            return
        if self._in_engine and not culprit:
            self._outcome = "failed", error
        self.stop(StopReason.RELEASED)

    def abandon(self) -> None:
        """Compute no more of it, and settle nothing: it is somebody else's by now.

        What it has made is stored if it still can be, which puts a lost log back.
        """
        self.may_be_reassigned = True
        self.stop(StopReason.RELEASED)

    def accept_redelivery(self, delivery: Delivery) -> None:
        """The same work again, after its ack wait: it is this attempt's once more."""
        self.delivery, self.received_at, self.may_be_reassigned = delivery, time.monotonic(), False

    async def extend_ack_wait(self) -> None:
        """Tell the broker that the work is alive, unless it may be somebody else's by now."""
        if not self.may_be_reassigned:
            await self.delivery.in_progress()

    async def run(self) -> FinishedRequest | None:
        """Serve the request to its terminal, then acknowledge the work."""
        try:
            finished = await self._serve()
        except Fenced as error:
            self.may_be_reassigned = True
            self._logger.warning("attempt_fenced", reason=str(error))
            await self._remove_from_engine()
            await self._poison_guard.record_outcome("released")
            return None
        except (BrokerUnavailable, StoreRefused) as error:  # its ack wait brings it to another
            self._logger.error("attempt_lost_broker", reason=str(error))
            await self._remove_from_engine()
            return None
        except Exception as error:  # one request's fault: it is tried again, and in the end not
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

    async def _remove_from_engine(self) -> None:
        """Only then may a new attempt at this request begin here: outputs know no attempts."""
        if self._in_engine:
            await self._engine_holder.cancel_and_wait(self.envelope.request_id)
            self._in_engine = False
        self._poison_guard.release_start()

    async def _serve(self) -> FinishedRequest | None:
        who = self._identity
        before = await self._token_log.claim(who.model, who.version, who.worker)
        self._number = before.attempts + 1
        if before.terminal is not None:
            await self._repeat_ledger_record(before)
            return None
        kept = LogContents() if before.is_truncated else before
        self._tokens, self._rows, self._characters = len(kept.tokens), kept.rows, len(kept.text)
        self._generated_before = before.generated_tokens
        await self._poison_guard.load_history(before)
        with self._deadline_timer():
            await self._wait_for_last_worker(before)
            if self._poison_guard.history.is_poison:
                self._final_history = self._poison_guard.history
                self.stop(StopReason.EXHAUSTED)
            await self._start_in_turn(kept)
            return await self._store_outputs()

    async def _wait_for_last_worker(self, before: LogContents) -> None:
        """Give the last worker time to say that it lives, if its silence alone would convict."""
        until = time.monotonic() + LAST_WORKER_GRACE_SECONDS
        while (
            self._stop_reason is None
            and self._poison_guard.history.is_poison_unconfirmed
            and time.monotonic() < until
        ):
            await asyncio.sleep(FENCE_CHECK_SECONDS / 4)
            await self._poison_guard.load_history(before)

    def _deadline_timer(self) -> DeadlineTimer:
        seconds = self._broker.clock.seconds_until(self.envelope.deadline)
        return DeadlineTimer(seconds, lambda: self.stop(StopReason.EXPIRED))

    async def _start_in_turn(self, before: LogContents) -> None:
        """Give the engine what is still to be done, if anything is and can be."""
        if await self._wait_for_turn():
            await self._poison_guard.record_start(self._tokens + self._rows)
            if self._stop_reason is None:
                self._add_to_engine(before)

    async def _wait_for_turn(self) -> bool:
        """Wait until it may start; False when it was stopped before."""
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
        request = Request.unpack(self.delivery.data)
        inputs = request.inputs[before.rows :]
        if request.inputs and not inputs:
            self.receive_output(Output(self.envelope.request_id, finish="stop"))
            return
        self._in_engine = True
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
                goal=None
                if self.first_output_goal is None
                else self._to_monotonic(self.first_output_goal),
                adapter=request.adapter,
                priority=self.priority,
                tenant=self.envelope.tenant,
            )
        )

    def _to_monotonic(self, at_ms: float) -> float:
        """A time by the monotonic clock, which is all that an engine knows."""
        return time.monotonic() + self._broker.clock.seconds_until(at_ms)

    @property
    def stored_tokens(self) -> int:
        """Tokens stored so far, by all attempts."""
        return self._tokens

    @property
    def seconds_left(self) -> float | None:
        """Until its end, if it generates all that it may; None while it has hardly begun."""
        left = self.envelope.cost - self.envelope.prompt_tokens - self._tokens
        return self._timer.estimate_seconds(left, self._generated)

    @property
    def priority(self) -> Priority:
        """That of the lane which the work came through."""
        return subjects.parse_work(self.delivery.subject).priority

    @property
    def first_output_goal(self) -> float | None:
        """When the model's goal for its client's priority wants its first output: epoch ms."""
        goals = self._identity.goals.get(Priority(self.envelope.priority or self.priority))
        ms = goals.time_to_first_token_ms if goals else None
        return None if ms is None else self.envelope.accepted + ms

    async def _store_outputs(self) -> FinishedRequest | None:
        """Append what the engine makes, one append in flight, until it is done or stopped."""
        while True:
            await self._wait_for_output()
            self._wake.clear()
            pending, self._buffer = self._buffer, OutputBuffer()
            await self._append(pending)
            await self._poison_guard.record_progress(self._tokens + self._rows)
            end = pending.final_output
            if self._stop_reason is StopReason.RELEASED and (not end or end.finish == "cancelled"):
                return None
            if self._stop_reason or end:
                return await self._finish(end)

    async def _wait_for_output(self) -> None:
        """Until there is something to do. Raises `Fenced`, on trial, soon after it was overtaken.

        A worker may be taken for dead that is only cut off: its request must not be convicted.
        """
        while self.is_quarantined and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(FENCE_CHECK_SECONDS):
                    await self._wake.wait()
                return
            with suppress(BrokerUnavailable):  # it cannot be known yet
                await self._token_log.check_not_fenced()
        await self._wake.wait()

    async def _append(self, pending: OutputBuffer) -> None:
        for chunk in pending.iter_chunks(self._tokens, self._characters):
            await self._token_log.append(chunk)
            self._tokens += chunk["count"]
            self._characters += len(chunk["text"])
        for record in pending.iter_results(self._rows):
            await self._token_log.append(record)
        self._rows += len(pending.vectors)

    async def _finish(self, end: Output | None) -> FinishedRequest:
        timing = self._timer.stage_durations(self.envelope)
        failures = len(self._final_history.failures)
        last = build_terminal(end, self._stop_reason, self._usage(end), timing, failures)
        if last.get("code") == StopReason.EXHAUSTED.value:
            await dead_letters.store_dead_letter(
                self._broker, self.delivery, self.envelope, last["code"], self._final_history
            )
        record = self._ledger_record(last, self._number, self._timer.first_output_at_ms)
        await self._token_log.append(last)
        self._finished_logs.add(self._token_log.to_finished(), time.monotonic())
        await write_ledger_record(self._broker, record)
        self._logger.info(
            "request_finished",
            outcome=record.outcome,
            attempt=self._number,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            **last.get("timing", {}),
        )
        return FinishedRequest(record, timing)

    def _usage(self, end: Output | None) -> TokenUsage:
        if end and end.usage:
            return messages.openai_usage(end.usage.prompt_tokens, end.usage.completion_tokens)
        cached = end.cached if end else 0
        generated = max(self._tokens, self._generated_before)  # its client may have had all of it
        return messages.openai_usage(self.envelope.prompt_tokens, generated, cached)

    async def _repeat_ledger_record(self, before: LogContents) -> None:
        """The log has its terminal; the attempt that wrote it may have died before the ledger."""
        assert before.terminal is not None
        attempts = max(1, before.attempts)
        await write_ledger_record(
            self._broker, self._ledger_record(before.terminal, attempts, first=0.0)
        )

    def _ledger_record(self, last: Mapping[str, Any], attempts: int, first: float) -> LedgerRecord:
        now_ms = self._broker.clock.now_ms()
        return build_ledger_record(self._identity, self.envelope, last, attempts, first, now_ms)
