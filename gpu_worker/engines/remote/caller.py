"""Calls, one after another until one succeeds: each when the gate lets it begin."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from gpu_worker.engine import EngineError
from gpu_worker.engines.remote.backoff import Backoff
from gpu_worker.engines.remote.breaker import FOREVER, State
from gpu_worker.engines.remote.faults import Fault, Refusal
from gpu_worker.engines.remote.gate import Gate

T = TypeVar("T")
SUSPICIOUS_CALLS = 4  # without progress, of a request that may be the cause of what fails
Answered = Callable[[], None]
Act = Callable[[Answered], Awaitable[T]]
log = structlog.get_logger()


@dataclass(frozen=True)
class Called:
    """One call that has ended: `ok`, `refused`, `failed`, `cancelled`, or its fault's label."""

    outcome: str
    state: State  # of the breaker, from now on
    again: bool  # an earlier call for the same has failed


class Caller:
    """Makes calls of all requests, on one event loop; `observe` learns how each ended."""

    def __init__(self, gate: Gate, backoff: Backoff, observe: Callable[[Called], None]) -> None:
        self._gate, self._backoff, self._observe = gate, backoff, observe
        self._first = asyncio.Lock()  # who waits longest goes first
        self._changed = asyncio.Event()

    async def persist(self, act: Act[T]) -> T:
        """What `act` returns, again and again as long as it raises a `Fault`.

        `act` is given a function to call when the server has begun to answer, or later. A fault
        that may be the request's own ends it with an `EngineError` when `SUSPICIOUS_CALLS` calls
        have brought nothing; any other is tried until this is cancelled, at the deadline.
        """
        failures = suspicions = 0
        while True:
            call = _Call(self._gate, self._changed, again=failures > 0)
            try:
                async with self._turn(call):
                    return await act(call.answered)
            except Fault as fault:
                failures = 1 if call.has_answer else failures + 1
                suspicions = (0 if call.has_answer else suspicions) + fault.suspicious
                if suspicions >= SUSPICIOUS_CALLS:
                    raise EngineError("upstream_failed", str(fault)) from fault
                delay = max(self._backoff.seconds(failures, random.random()), fault.retry_after)
                log.info("remote_call_retried", reason=fault.label, failures=failures, retry_seconds=delay)
            await asyncio.sleep(delay)

    @asynccontextmanager
    async def _turn(self, call: "_Call") -> AsyncIterator[None]:
        await self._begin(call)
        outcome = "cancelled"
        try:
            yield
            outcome = "ok"
        except Fault as fault:
            outcome = fault.label
            self._gate.failed(call.number, fault, time.monotonic())
            raise
        except Refusal:
            outcome = "refused"
            call.answered()
            raise
        except EngineError:  # found here, before the call or in its answer
            outcome = "failed"
            raise
        finally:
            self._gate.end(call.number)
            self._changed.set()
            self._observe(Called(outcome, self._gate.state(time.monotonic()), call.again))

    async def _begin(self, call: "_Call") -> None:
        async with self._first:
            while (seconds := self._gate.wait(time.monotonic())) > 0:
                self._changed.clear()
                await self._change(seconds)
            call.number = self._gate.begin(time.monotonic())

    async def _change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(None if seconds == FOREVER else seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


class _Call:
    """A call that may begin; the first sign of an answer is what the gate wants to know."""

    def __init__(self, gate: Gate, changed: asyncio.Event, *, again: bool) -> None:
        self._gate, self._changed, self.again = gate, changed, again
        self.number = 0
        self.has_answer = False

    def answered(self) -> None:
        """Idempotent."""
        if not self.has_answer:
            self.has_answer = True
            self._gate.answered(self.number)
            self._changed.set()
