"""Decides when the next call may begin: concurrency limit, Retry-After pauses, breaker. Pure.

The limit is additive increase, multiplicative decrease (Chiu and Jain, 1989): halved when the
server answers that it has too much to do, at most once a second since one overload refuses many
calls, and raised by one for each round of calls that succeed. A Retry-After holds back every call,
not only the one that got it.
"""

from gpu_worker.engines.remote.call_errors import RetryableError
from gpu_worker.engines.remote.circuit_breaker import FOREVER, BreakerState, CircuitBreaker

_HALVING_INTERVAL_SECONDS = 1.0


class ConcurrencyLimiter:
    """Limits the calls to one server, `concurrency` at most, and numbers them.

    Times are passed in by the caller, in seconds of any one clock.
    """

    def __init__(self, concurrency: int, breaker: CircuitBreaker) -> None:
        self._max_limit, self._limit = concurrency, float(concurrency)
        self._breaker = breaker
        self._calls: set[int] = set()
        self._last_number = 0
        self._paused_until = self._halved_at = -FOREVER

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until a call may begin: 0 is now, `FOREVER` until another ends."""
        if len(self._calls) >= int(self._limit):
            return FOREVER
        return max(self._breaker.wait_seconds(now), self._paused_until - now, 0.0)

    def acquire(self, now: float) -> int:
        """Begin a call, which `wait_seconds` must allow; returns its number."""
        self._last_number += 1
        self._breaker.acquire(self._last_number, now)
        self._calls.add(self._last_number)
        return self._last_number

    def record_answer(self, call: int) -> None:
        """Record that the server works: it began an answer, or rejected the request."""
        self._breaker.record_success(call)
        self._limit = min(float(self._max_limit), self._limit + 1 / self._limit)

    def record_failure(self, call: int, error: RetryableError, now: float) -> None:
        """Record how a call failed: it may pause all calls, halve the limit or open the breaker."""
        self._paused_until = max(self._paused_until, now + error.retry_after)
        if error.throttles and now >= self._halved_at + _HALVING_INTERVAL_SECONDS:
            self._limit, self._halved_at = max(1.0, self._limit / 2), now
        if error.alive:
            self._breaker.record_success(call)
        else:
            self._breaker.record_failure(call, now)

    def release(self, call: int) -> None:
        """End a call, however it went. Idempotent."""
        self._calls.discard(call)
        self._breaker.release(call)

    def breaker_state(self, now: float) -> BreakerState:
        """Return the circuit breaker's state at a time."""
        return self._breaker.state(now)

    def capacity(self, now: float) -> int:
        """Return how many requests the server can take now.

        None while the breaker is open or calls are paused, one (the probe) while it is half-open.
        """
        state = self._breaker.state(now)
        if state == "open" or now < self._paused_until:
            return 0
        return 1 if state == "half_open" else int(self._limit)
