"""One worker's try at one request: claim, run, store every token, end, acknowledge."""

import time
from asyncio import Event
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import structlog

from gpu_worker.clock import Clock, Timer
from gpu_worker.engine import EngineError, Output, Sequence
from gpu_worker.mount import Mount
from gpu_worker.pending import Pending
from registry.models import Goals
from streams import dead_letters, messages, subjects
from streams.connection import Broker
from streams.errors import BrokerUnavailable
from streams.headers import Envelope
from streams.messages import LedgerRecord, Request, Usage
from streams.pull import Delivery
from streams.subjects import Log, Priority
from streams.token_log import Contents, Fenced, TokenLog, write_ledger

LAST_TRY = 3  # deliveries after which a request whose engine crashes is not tried again
FAILED_SECONDS = 0.5  # before a request whose attempt failed is tried again


class Stopped(Enum):
    """Why an attempt was told to stop before its engine was done."""

    CANCELLED = "cancelled"
    EXPIRED = "deadline_exceeded"
    EXHAUSTED = "attempts_exhausted"  # with every try an engine crashed
    RELEASED = "released"  # given back to the pool: no terminal


@dataclass(frozen=True)
class Identity:
    """Who serves: what the claim and the ledger say."""

    model: str
    version: str
    worker: str
    shards: int
    goals: Mapping[Priority, Goals] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """What the observers learn of an attempt that ended its request."""

    record: LedgerRecord
    timing: dict[str, float]


class Attempt:
    """Owns one delivery until its terminal is stored, or another attempt has taken over.

    `accept` takes the engine's outputs; `run` does the rest and returns what was finished, or None
    when somebody else ends the request.
    """

    def __init__(
        self, broker: Broker, mount: Mount, delivery: Delivery, envelope: Envelope, who: Identity
    ) -> None:
        self.envelope = envelope
        self.delivery = delivery
        self.lapsed = False  # the broker may have given the work to somebody else
        self._mount, self._who, self._broker = mount, who, broker
        self._log = TokenLog(
            broker, Log(envelope.tenant, envelope.route, envelope.request_id), who.shards
        )
        self._pending = Pending()
        self._ready = Event()
        self._stopped: Stopped | None = None
        self._clock = Clock()
        self._tokens = self._rows = 0  # stored, by all attempts
        self._attempt = 1
        self._in_engine = False
        self._observed = structlog.get_logger().bind(
            request_id=envelope.request_id, tenant=envelope.tenant
        )

    def accept(self, output: Output) -> None:
        """The engine's next output for this request; called on the loop."""
        if not self._clock.first:
            self._clock.first = time.time() * 1000
        self._pending.add(output)
        if self._pending.end:
            self._in_engine = False
        self._ready.set()

    def stop(self, why: Stopped) -> None:
        """End early: the engine drops the sequence by its next step. The first reason stays."""
        if self._stopped is None:
            self._stopped = why
            self._mount.cancel(self.envelope.request_id)
            self._ready.set()

    @property
    def is_poison(self) -> bool:
        """Whether it may be blamed when the engine fails now: not the first time, and in there."""
        return self._in_engine and self.delivery.delivered >= LAST_TRY

    def redelivered(self, delivery: Delivery) -> None:
        """The same work again, after its ack wait: it is this attempt's once more."""
        self.delivery, self.lapsed = delivery, False

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
            return None
        except BrokerUnavailable as error:  # undelivered acks will bring it to another worker
            self._observed.error("attempt_lost_broker", reason=str(error))
            await self._leave_engine()
            return None
        except Exception:  # one request's fault: it is tried again, and at last a dead letter
            self._observed.exception("attempt_failed")
            await self._leave_engine()
            await self.delivery.nak(FAILED_SECONDS)
            return None
        await self._leave_engine()
        if self._stopped is Stopped.RELEASED and finished is None:
            await self.delivery.nak()
        else:
            await self.delivery.ack()  # only now: a crash before this line repeats, never loses
        return finished

    async def _leave_engine(self) -> None:
        """Only then may a new attempt at this request begin here: outputs know no attempts."""
        if self._in_engine:
            await self._mount.drop(self.envelope.request_id)
            self._in_engine = False

    async def _serve(self) -> Finished | None:
        request = Request.unpack(self.delivery.data)
        who = self._who
        before = await self._log.claim(who.model, who.version, who.worker)
        self._attempt = before.attempts + 1
        if before.terminal is not None:
            await self._confirm(before)
            return None
        self._tokens, self._rows = len(before.tokens), before.rows
        with self._expiry():
            if self._stopped is None:
                self._begin(request, before)
            return await self._relay()

    def _expiry(self) -> Timer:
        seconds = self.envelope.deadline / 1000 - time.time()
        return Timer(seconds, lambda: self.stop(Stopped.EXPIRED))

    def _begin(self, request: Request, before: Contents) -> None:
        """Give the engine what is still to be done, if anything is and can be."""
        if not before.whole:
            lost = EngineError("log_lost", "the broker has lost a part of this request's output")
            self.accept(Output(self.envelope.request_id, error=lost))
            return
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
                deadline=self.envelope.deadline / 1000,
                goal=self.goal,
                adapter=request.adapter,
                priority=self.priority,
                tenant=self.envelope.tenant,
            )
        )

    @property
    def tokens(self) -> int:
        """Tokens stored so far, by all attempts."""
        return self._tokens

    @property
    def priority(self) -> Priority:
        """That of the lane which the work came through."""
        return subjects.parse_work(self.delivery.subject).priority

    @property
    def goal(self) -> float | None:
        """When the model's goal for its client's priority wants its first output: epoch seconds."""
        goals = self._who.goals.get(Priority(self.envelope.priority or self.priority))
        ms = goals.time_to_first_token_ms if goals else None
        return None if ms is None else (self.envelope.accepted + ms) / 1000

    async def _relay(self) -> Finished | None:
        """Append what the engine makes, one append in flight, until it is done or stopped."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, Pending()
            await self._append(pending)
            end = pending.end
            if self._stopped is Stopped.RELEASED and (not end or end.finish == "cancelled"):
                return None
            if self._stopped or end:
                return await self._end(end)

    async def _append(self, pending: Pending) -> None:
        for chunk in pending.chunks(self._tokens):
            await self._log.append(chunk)
            self._tokens += chunk["count"]
        for record in pending.results(self._rows):
            await self._log.append(record)
        self._rows += len(pending.vectors)

    async def _end(self, end: Output | None) -> Finished:
        timing = self._clock.stages(self.envelope)
        terminal = self._terminal(end, timing)
        if self._stopped is Stopped.EXHAUSTED:
            await dead_letters.keep(
                self._broker, self.delivery, self.envelope, self._who.model, terminal["code"]
            )
        outcome = terminal.get("finish_reason") or terminal["code"]
        record = self._record(outcome, terminal["usage"])
        await self._log.end(terminal, record)
        self._observed.info(
            "request_finished",
            outcome=outcome,
            attempt=self._attempt,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            **terminal.get("timing", {}),
        )
        return Finished(record, timing)

    def _terminal(self, end: Output | None, timing: dict[str, float]) -> dict[str, Any]:
        used = self._usage(end)
        if end and end.error:
            return messages.failed(end.error.code, str(end.error), used)
        if end and end.finish and end.finish != "cancelled":
            return messages.done(end.finish, used, timing)
        if self._stopped is Stopped.EXHAUSTED:
            message = f"its engine failed at each of {self.delivery.delivered} deliveries"
            return messages.failed("attempts_exhausted", message, used)
        if self._stopped is Stopped.EXPIRED:
            return messages.failed("deadline_exceeded", "the deadline has passed", used)
        return messages.done("cancelled", used, timing)

    def _usage(self, end: Output | None) -> Usage:
        if end and end.usage:
            return messages.usage(end.usage.prompt_tokens, end.usage.completion_tokens)
        cached = end.cached if end else 0
        return messages.usage(self.envelope.prompt_tokens, self._tokens, cached)

    def _record(self, outcome: str, used: Usage) -> LedgerRecord:
        envelope, who = self.envelope, self._who
        return LedgerRecord(
            request_id=envelope.request_id,
            tenant=envelope.tenant,
            model=who.model,
            version=who.version,
            outcome=outcome,
            prompt_tokens=used["prompt_tokens"],
            completion_tokens=used["completion_tokens"],
            attempts=self._attempt,
            worker=who.worker,
            accepted=envelope.accepted,
            finished=int(time.time() * 1000),
            adapter=envelope.adapter,
            account=envelope.account,
            first=round(self._clock.first),
            cached_tokens=messages.cached_tokens(used),
        )

    async def _confirm(self, before: Contents) -> None:
        """The log has its terminal; the attempt that wrote it may have died before the ledger."""
        terminal = before.terminal
        assert terminal is not None
        self._attempt = max(1, before.attempts)
        outcome = terminal.get("finish_reason") or terminal["code"]
        await write_ledger(self._broker, self._record(outcome, terminal["usage"]))
