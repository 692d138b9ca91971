"""One worker's try at one request: claim, run, store every token, end, acknowledge."""

import asyncio
import time
from asyncio import Event
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from gpu_worker.clock import Clock, Timer
from gpu_worker.ended_logs import EndedLogs
from gpu_worker.engine import Output, Sequence
from gpu_worker.mount import Mount
from gpu_worker.outcome import Finished, Identity, Stopped, ledger_record, terminal
from gpu_worker.pending import Pending
from gpu_worker.standing import Standing
from gpu_worker.starts import Starts
from streams import dead_letters, messages, subjects
from streams.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import Envelope
from streams.history import History, Kind
from streams.messages import LedgerRecord, Request, Usage
from streams.pull import Delivery
from streams.subjects import Log, Priority
from streams.token_log import Contents, Fenced, TokenLog, write_ledger
from streams.written import Page, Question

FAILED_SECONDS = 0.5  # before a request whose attempt failed is tried again
LOOK_SECONDS = 1.0  # between an attempt's looks, while it is on trial, whether it was overtaken
HEARING_SECONDS = 3.0  # for a worker that was only cut off to say so, before its silence convicts


class Attempt:
    """Owns one delivery until its terminal is stored, or another attempt has taken over.

    `accept` takes the engine's outputs; `run` does the rest and returns what was finished, or None
    when somebody else ends the request.
    """

    def __init__(
        self,
        broker: Broker,
        mount: Mount,
        starts: Starts,
        delivery: Delivery,
        envelope: Envelope,
        who: Identity,
        ended: EndedLogs,
    ) -> None:
        self.envelope = envelope
        self.delivery, self.taken_at = delivery, time.monotonic()
        self.lapsed = False  # the broker may have given the work to somebody else
        self._mount, self._who, self._broker, self._ended = mount, who, broker, ended
        address = Log(envelope.tenant, envelope.route, envelope.request_id)
        self._log = TokenLog(broker, address, who.shards)
        self._standing = Standing(broker, address, who.worker, starts)
        self._said: tuple[Kind, str] = ("released", "")  # of this attempt, if it ends nothing
        self._tried = History()  # all attempts, if it was the last one
        self._pending = Pending()
        self._ready = Event()
        self._stopped: Stopped | None = None
        self._clock = Clock(broker.clock.now)
        self._tokens = self._characters = self._rows = 0  # stored, by all attempts
        self._said_before = 0  # tokens, by earlier ones, of which some may be lost
        self._made = 0  # tokens, by this one
        self._attempt = 1
        self._in_engine = False
        self._observed = structlog.get_logger().bind(
            request_id=envelope.request_id, tenant=envelope.tenant
        )

    def accept(self, output: Output) -> None:
        """The engine's next output for this request; called on the loop."""
        if not self._clock.first:
            self._clock.begin()
        self._made += len(output.tokens)
        self._pending.add(output)
        if self._pending.end:
            self._in_engine = False
        self._ready.set()

    @property
    def goes_on(self) -> bool:
        """Whether nobody has told it to stop."""
        return self._stopped is None

    def stop(self, why: Stopped) -> None:
        """End early: the engine drops the sequence by its next step. The first reason stays."""
        if self._stopped is None:
            self._stopped = why
            self._mount.cancel(self.envelope.request_id)
            self._ready.set()

    def written(self, question: Question) -> Page:
        """What it knows to be stored of its log."""
        return self._log.written.page(question)

    @property
    def on_trial(self) -> bool:
        """Whether it is to blame if the engine fails now."""
        return self._standing.on_trial

    def lose_engine(self, error: str, culprit: bool) -> None:
        """The engine has failed; `culprit` says that somebody was on trial there."""
        if self.on_trial:
            self._tried = self._standing.convicted(error)
            self.stop(Stopped.EXHAUSTED)
            return
        if self._in_engine and not culprit:
            self._said = "failed", error
        self.stop(Stopped.RELEASED)

    def let_go(self) -> None:
        """Compute no more of it, and settle nothing: it is somebody else's by now.

        What it has made is stored if it still can be, which puts a lost log back.
        """
        self.lapsed = True
        self.stop(Stopped.RELEASED)

    def redelivered(self, delivery: Delivery) -> None:
        """The same work again, after its ack wait: it is this attempt's once more."""
        self.delivery, self.taken_at, self.lapsed = delivery, time.monotonic(), False

    async def hold(self) -> None:
        """Tell the broker that the work is alive, unless it may be somebody else's by now."""
        if not self.lapsed:
            await self.delivery.in_progress()

    async def run(self) -> Finished | None:
        """Serve the request to its terminal, then acknowledge the work."""
        try:
            finished = await self._serve()
        except Fenced as error:
            self.lapsed = True
            self._observed.warning("attempt_fenced", reason=str(error))
            await self._leave_engine()
            await self._standing.ended("released")
            return None
        except (BrokerUnavailable, StoreRefused) as error:  # its ack wait brings it to another
            self._observed.error("attempt_lost_broker", reason=str(error))
            await self._leave_engine()
            return None
        except Exception as error:  # one request's fault: it is tried again, and in the end not
            self._observed.exception("attempt_failed")
            await self._leave_engine()
            await self._standing.ended("broke", repr(error))
            await self.delivery.nak(FAILED_SECONDS)
            return None
        await self._leave_engine()
        if self._stopped is Stopped.RELEASED and finished is None:
            await self._standing.ended(*self._said)
            if not self.lapsed:
                await self.delivery.nak()
        else:
            await self.delivery.ack()  # only now: a crash before this line repeats, never loses
        return finished

    async def _leave_engine(self) -> None:
        """Only then may a new attempt at this request begin here: outputs know no attempts."""
        if self._in_engine:
            await self._mount.drop(self.envelope.request_id)
            self._in_engine = False
        self._standing.leave()

    async def _serve(self) -> Finished | None:
        who = self._who
        before = await self._log.claim(who.model, who.version, who.worker)
        self._attempt = before.attempts + 1
        if before.terminal is not None:
            await self._confirm(before)
            return None
        kept = Contents() if before.is_headless else before
        self._tokens, self._rows, self._characters = len(kept.tokens), kept.rows, len(kept.text)
        self._said_before = before.generated
        await self._standing.learn(before)
        with self._expiry():
            await self._hear(before)
            if self._standing.history.is_guilty:
                self._tried = self._standing.history
                self.stop(Stopped.EXHAUSTED)
            await self._begin_in_turn(kept)
            return await self._relay()

    async def _hear(self, before: Contents) -> None:
        """Give the last worker time to say that it lives, if its silence alone would convict."""
        until = time.monotonic() + HEARING_SECONDS
        while (
            self._stopped is None
            and self._standing.history.may_be_wrong
            and time.monotonic() < until
        ):
            await asyncio.sleep(LOOK_SECONDS / 4)
            await self._standing.learn(before)

    def _expiry(self) -> Timer:
        seconds = self._broker.clock.until(self.envelope.deadline)
        return Timer(seconds, lambda: self.stop(Stopped.EXPIRED))

    async def _begin_in_turn(self, before: Contents) -> None:
        """Give the engine what is still to be done, if anything is and can be."""
        if await self._has_turn():
            await self._standing.begin(self._tokens + self._rows)
            if self._stopped is None:
                self._begin(before)

    async def _has_turn(self) -> bool:
        """Wait until it may start; False when it was stopped before."""
        turn = Event()

        def begin() -> None:
            turn.set()
            self._ready.set()

        if self._stopped is None:
            self._standing.ask(begin)
        while self._stopped is None and not turn.is_set():
            self._ready.clear()
            await self._ready.wait()
        return self._stopped is None

    def _begin(self, before: Contents) -> None:
        request = Request.unpack(self.delivery.data)
        inputs = request.inputs[before.rows :]
        if request.inputs and not inputs:
            self.accept(Output(self.envelope.request_id, finish="stop"))
            return
        self._in_engine = True
        self._mount.add(
            Sequence(
                request_id=self.envelope.request_id,
                prompt=messages.unpack_tokens(request.prompt),
                sampling=request.sampling,
                generated=before.tokens,
                text=before.text,
                inputs=[messages.unpack_tokens(tokens) for tokens in inputs],
                splits=request.splits[before.rows :],
                dimensions=request.dimensions,
                deadline=self._timely(self.envelope.deadline),
                goal=None if self.goal is None else self._timely(self.goal),
                adapter=request.adapter,
                priority=self.priority,
                tenant=self.envelope.tenant,
            )
        )

    def _timely(self, at_ms: float) -> float:
        """A time by the monotonic clock, which is all that an engine knows."""
        return time.monotonic() + self._broker.clock.until(at_ms)

    @property
    def tokens(self) -> int:
        """Tokens stored so far, by all attempts."""
        return self._tokens

    @property
    def seconds_left(self) -> float | None:
        """Until its end, if it generates all that it may; None while it has hardly begun."""
        left = self.envelope.cost - self.envelope.prompt_tokens - self._tokens
        return self._clock.seconds_for(left, self._made)

    @property
    def priority(self) -> Priority:
        """That of the lane which the work came through."""
        return subjects.parse_work(self.delivery.subject).priority

    @property
    def goal(self) -> float | None:
        """When the model's goal for its client's priority wants its first output: epoch ms."""
        goals = self._who.goals.get(Priority(self.envelope.priority or self.priority))
        ms = goals.time_to_first_token_ms if goals else None
        return None if ms is None else self.envelope.accepted + ms

    async def _relay(self) -> Finished | None:
        """Append what the engine makes, one append in flight, until it is done or stopped."""
        while True:
            await self._wait()
            self._ready.clear()
            pending, self._pending = self._pending, Pending()
            await self._append(pending)
            await self._standing.got_on(self._tokens + self._rows)
            end = pending.end
            if self._stopped is Stopped.RELEASED and (not end or end.finish == "cancelled"):
                return None
            if self._stopped or end:
                return await self._end(end)

    async def _wait(self) -> None:
        """Until there is something to do. Raises `Fenced`, on trial, soon after it was overtaken.

        A worker may be taken for dead that is only cut off: its request must not be convicted.
        """
        while self.on_trial and not self._ready.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._ready.wait()
                return
            with suppress(BrokerUnavailable):  # it cannot be known yet
                await self._log.look()
        await self._ready.wait()

    async def _append(self, pending: Pending) -> None:
        for chunk in pending.chunks(self._tokens, self._characters):
            await self._log.append(chunk)
            self._tokens += chunk["count"]
            self._characters += len(chunk["text"])
        for record in pending.results(self._rows):
            await self._log.append(record)
        self._rows += len(pending.vectors)

    async def _end(self, end: Output | None) -> Finished:
        timing = self._clock.stages(self.envelope)
        failures = len(self._tried.failures)
        last = terminal(end, self._stopped, self._usage(end), timing, failures)
        if last.get("code") == Stopped.EXHAUSTED.value:
            await dead_letters.keep(
                self._broker, self.delivery, self.envelope, last["code"], self._tried
            )
        record = self._record(last, self._attempt, self._clock.first)
        await self._log.append(last)
        self._ended.keep(self._log.ended(), time.monotonic())
        await write_ledger(self._broker, record)
        self._observed.info(
            "request_finished",
            outcome=record.outcome,
            attempt=self._attempt,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            **last.get("timing", {}),
        )
        return Finished(record, timing)

    def _usage(self, end: Output | None) -> Usage:
        if end and end.usage:
            return messages.usage(end.usage.prompt_tokens, end.usage.completion_tokens)
        cached = end.cached if end else 0
        generated = max(self._tokens, self._said_before)  # its client may have had all of it
        return messages.usage(self.envelope.prompt_tokens, generated, cached)

    async def _confirm(self, before: Contents) -> None:
        """The log has its terminal; the attempt that wrote it may have died before the ledger."""
        assert before.terminal is not None
        attempts = max(1, before.attempts)
        await write_ledger(self._broker, self._record(before.terminal, attempts, first=0.0))

    def _record(self, last: Mapping[str, Any], attempts: int, first: float) -> LedgerRecord:
        now_ms = self._broker.clock.now_ms()
        return ledger_record(self._who, self.envelope, last, attempts, first, now_ms)
