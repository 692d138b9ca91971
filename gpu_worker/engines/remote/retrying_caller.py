"""Calls, one after another until one succeeds: each when the gate lets it begin."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from gpu_worker.engines.engine import EngineError
from gpu_worker.engines.remote.backoff import Backoff
from gpu_worker.engines.remote.call_errors import RequestRejected, RetryableError
from gpu_worker.engines.remote.circuit_breaker import FOREVER, BreakerState
from gpu_worker.engines.remote.concurrency_limiter import ConcurrencyLimiter

T = TypeVar("T")
SUSPICIOUS_CALLS = 4  # without progress, of a request that may be the cause of what fails
MarkAnswered = Callable[[], None]
CallAction = Callable[[MarkAnswered], Awaitable[T]]
log = structlog.get_logger()


@dataclass(frozen=True)
class CallResult:
    """One call that has ended: `ok`, `refused`, `failed`, `cancelled`, or its fault's label."""

    outcome: str
    breaker_state: BreakerState  # of the breaker, from now on
    is_retry: bool  # an earlier call for the same has failed


class RetryingCaller:
    """Makes calls of all requests, on one event loop; `observe` learns how each ended."""

    def __init__(
        self, gate: ConcurrencyLimiter, backoff: Backoff, observe: Callable[[CallResult], None]
    ) -> None:
        self._limiter, self._backoff, self._observe = gate, backoff, observe
        self._waiting_line = asyncio.Lock()  # who waits longest goes first
        self._changed = asyncio.Event()

    async def call_with_retries(self, act: CallAction[T]) -> T:
        """What `act` returns, again and again as long as it raises a `Fault`.

        `act` is given a function to call when the server has begun to answer, or later. A fault
        that may be the request's own ends it with an `EngineError` when `SUSPICIOUS_CALLS` calls
        have brought nothing; any other is tried until this is cancelled, at the deadline.
        """
        failures = suspicions = 0
        while True:
            call = _RemoteCall(self._limiter, self._changed, again=failures > 0)
            try:
                async with self._call_slot(call):
                    return await act(call.mark_answered)
            except RetryableError as fault:
                failures = 1 if call.has_answer else failures + 1
                suspicions = (0 if call.has_answer else suspicions) + fault.suspicious
                if suspicions >= SUSPICIOUS_CALLS:
                    raise EngineError("upstream_failed", str(fault)) from fault
                delay = max(
                    self._backoff.delay_seconds(failures, random.random()), fault.retry_after
                )
                log.info(
                    "remote_call_retried",
                    reason=fault.label,
                    failures=failures,
                    retry_seconds=delay,
                )
            await asyncio.sleep(delay)

    @asynccontextmanager
    async def _call_slot(self, call: "_RemoteCall") -> AsyncIterator[None]:
        await self._acquire(call)
        outcome = "cancelled"
        try:
            yield
            outcome = "ok"
        except RetryableError as fault:
            outcome = fault.label
            self._limiter.record_failure(call.number, fault, time.monotonic())
            raise
        except RequestRejected:
            outcome = "refused"
            call.mark_answered()
            raise
        except EngineError:  # found here, before the call or in its answer
            outcome = "failed"
            raise
        finally:
            self._limiter.release(call.number)
            self._changed.set()
            self._observe(
                CallResult(outcome, self._limiter.breaker_state(time.monotonic()), call.is_retry)
            )

    async def _acquire(self, call: "_RemoteCall") -> None:
        async with self._waiting_line:
            while (seconds := self._limiter.wait_seconds(time.monotonic())) > 0:
                self._changed.clear()
                await self._wait_for_change(seconds)
            call.number = self._limiter.acquire(time.monotonic())

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(None if seconds == FOREVER else seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


class _RemoteCall:
    """A call that may begin; the first sign of an answer is what the gate wants to know."""

    def __init__(self, gate: ConcurrencyLimiter, changed: asyncio.Event, *, again: bool) -> None:
        self._limiter, self._changed, self.is_retry = gate, changed, again
        self.number = 0
        self.has_answer = False

    def mark_answered(self) -> None:
        """Idempotent."""
        if not self.has_answer:
            self.has_answer = True
            self._limiter.record_answer(self.number)
            self._changed.set()
