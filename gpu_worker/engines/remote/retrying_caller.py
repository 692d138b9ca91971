"""Makes calls for a request until one succeeds, each when the concurrency limiter allows it."""

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
SUSPICIOUS_CALLS = 4  # suspicious failures without progress, after which a request fails
MarkAnswered = Callable[[], None]
CallAction = Callable[[MarkAnswered], Awaitable[T]]
log = structlog.get_logger()


@dataclass(frozen=True)
class CallResult:
    """The end of one call to the server, as metrics get it.

    `outcome` is ok, refused, failed, cancelled, or the label of a `RetryableError`.
    """

    outcome: str
    breaker_state: BreakerState  # after the call
    is_retry: bool  # an earlier call for the same request has failed


class RetryingCaller:
    """Makes the calls of all requests to one server, on one event loop, and retries them.

    A call waits until the limiter allows it, the longest waiting first. `observe` gets the result
    of each call.
    """

    def __init__(
        self, limiter: ConcurrencyLimiter, backoff: Backoff, observe: Callable[[CallResult], None]
    ) -> None:
        self._limiter, self._backoff, self._observe = limiter, backoff, observe
        self._turn = asyncio.Lock()  # the lock is fair: the call that waits longest goes first
        self._changed = asyncio.Event()

    async def call_with_retries(self, action: CallAction[T]) -> T:
        """Call `action` until it raises no `RetryableError`, and return what it returns.

        `action` makes one call to the server; its argument is a function that it calls once the
        server has begun to answer with something new. Raises `EngineError` after four suspicious
        failures (the request itself may be the cause) without such an answer in between. Other
        failures are retried, with growing pauses, until the caller cancels this, as it does at the
        request's deadline. Other errors of `action` are raised as they are.
        """
        failures = suspicions = 0
        while True:
            call = _RemoteCall(self._limiter, self._changed, is_retry=failures > 0)
            try:
                async with self._call_slot(call):
                    return await action(call.mark_answered)
            except RetryableError as error:
                failures = 1 if call.has_answer else failures + 1
                suspicions = (0 if call.has_answer else suspicions) + error.suspicious
                if suspicions >= SUSPICIOUS_CALLS:
                    raise EngineError("upstream_failed", str(error)) from error
                delay = max(
                    self._backoff.delay_seconds(failures, random.random()), error.retry_after
                )
                log.info(
                    "remote_call_retried",
                    reason=error.label,
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
        except RetryableError as error:
            outcome = error.label
            self._limiter.record_failure(call.number, error, time.monotonic())
            raise
        except RequestRejected:
            outcome = "refused"
            call.mark_answered()
            raise
        except EngineError:  # found by us, before the call or in its answer
            outcome = "failed"
            raise
        finally:
            self._limiter.release(call.number)
            self._changed.set()
            self._observe(
                CallResult(outcome, self._limiter.breaker_state(time.monotonic()), call.is_retry)
            )

    async def _acquire(self, call: "_RemoteCall") -> None:
        async with self._turn:
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
    """One call; it tells the limiter of the first sign of an answer."""

    def __init__(
        self, limiter: ConcurrencyLimiter, changed: asyncio.Event, *, is_retry: bool
    ) -> None:
        self._limiter, self._changed, self.is_retry = limiter, changed, is_retry
        self.number = 0
        self.has_answer = False

    def mark_answered(self) -> None:
        """Record that the server has begun to answer. Idempotent."""
        if not self.has_answer:
            self.has_answer = True
            self._limiter.record_answer(self.number)
            self._changed.set()
