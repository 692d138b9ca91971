"""When a call may begin, and how many at once: concurrency limit, pauses, breaker. Pure.

The limit is additive increase, multiplicative decrease (Chiu and Jain, 1989): halved when the
server answers that it has too much to do, at most once a second since one overload refuses many
calls, and raised by one for each round of calls that succeed. A Retry-After holds back every call,
not only the one that was told.
"""

from gpu_worker.engines.remote.call_errors import RetryableError
from gpu_worker.engines.remote.circuit_breaker import FOREVER, BreakerState, CircuitBreaker

_HALVING_INTERVAL_SECONDS = 1.0


class ConcurrencyLimiter:
    """Owns the calls' numbers. Times are seconds of any one clock, given by the caller."""

    def __init__(self, concurrency: int, breaker: CircuitBreaker) -> None:
        self._most, self._limit = concurrency, float(concurrency)
        self._breaker = breaker
        self._calls: set[int] = set()
        self._number = 0
        self._paused_until = self._halved_at = -FOREVER

    def wait_seconds(self, now: float) -> float:
        """Seconds until a call may begin: 0 is now, `FOREVER` when another's end has to tell."""
        if len(self._calls) >= int(self._limit):
            return FOREVER
        return max(self._breaker.wait_seconds(now), self._paused_until - now, 0.0)

    def acquire(self, now: float) -> int:
        """The number of a call that begins, which `wait` must have allowed."""
        self._number += 1
        self._breaker.acquire(self._number, now)
        self._calls.add(self._number)
        return self._number

    def record_answer(self, call: int) -> None:
        """The server works: it has begun an answer, or has found fault with the request."""
        self._breaker.record_success(call)
        self._limit = min(float(self._most), self._limit + 1 / self._limit)

    def record_failure(self, call: int, fault: RetryableError, now: float) -> None:
        self._paused_until = max(self._paused_until, now + fault.retry_after)
        if fault.throttles and now >= self._halved_at + _HALVING_INTERVAL_SECONDS:
            self._limit, self._halved_at = max(1.0, self._limit / 2), now
        if fault.alive:
            self._breaker.record_success(call)
        else:
            self._breaker.record_failure(call, now)

    def release(self, call: int) -> None:
        """The call is over, whatever became of it."""
        self._calls.discard(call)
        self._breaker.release(call)

    def breaker_state(self, now: float) -> BreakerState:
        return self._breaker.state(now)

    def capacity(self, now: float) -> int:
        """How many requests may be held now: none while it is closed to all, one to probe with."""
        state = self._breaker.state(now)
        if state == "open" or now < self._paused_until:
            return 0
        return 1 if state == "half_open" else int(self._limit)
