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
    """Decides when the next call to one server may begin; at most `concurrency` run at once.

    The limit is halved when the server is overloaded and grows again with each answer; the circuit
    breaker and the server's Retry-After also hold calls back. Calls are told apart by numbers.
    `now` is in seconds of any one clock.
    """

    def __init__(self, concurrency: int, breaker: CircuitBreaker) -> None:
        self._max_limit, self._limit = concurrency, float(concurrency)
        self._breaker = breaker
        self._calls: set[int] = set()
        self._last_number = 0
        self._paused_until = self._halved_at = -FOREVER

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until a call may begin: 0 is now, infinite until another call ends."""
        if len(self._calls) >= int(self._limit):
            return FOREVER
        return max(self._breaker.wait_seconds(now), self._paused_until - now, 0.0)

    def acquire(self, now: float) -> int:
        """Record that a call begins, and return its number.

        Allowed only while `wait_seconds` returns 0. The caller must `release` the call at its end.
        """
        self._last_number += 1
        self._breaker.acquire(self._last_number, now)
        self._calls.add(self._last_number)
        return self._last_number

    def record_answer(self, call: int) -> None:
        """Record that the server has begun to answer this call, or has rejected its request.

        Either shows that the server works. Call this at most once per call. The call counts as
        running until `release`.
        """
        self._breaker.record_success(call)
        self._limit = min(float(self._max_limit), self._limit + 1 / self._limit)

    def record_failure(self, call: int, error: RetryableError, now: float) -> None:
        """Record that a call failed with `error`, which may hold back the calls after it.

        A Retry-After pauses all calls; an overload halves the limit, at most once a second; a
        server that does not work brings the circuit breaker closer to opening. The call counts as
        running until `release`.
        """
        self._paused_until = max(self._paused_until, now + error.retry_after)
        if error.throttles and now >= self._halved_at + _HALVING_INTERVAL_SECONDS:
            self._limit, self._halved_at = max(1.0, self._limit / 2), now
        if error.alive:
            self._breaker.record_success(call)
        else:
            self._breaker.record_failure(call, now)

    def release(self, call: int) -> None:
        """Stop counting a call as running, however it went. Idempotent."""
        self._calls.discard(call)
        self._breaker.release(call)

    def breaker_state(self, now: float) -> BreakerState:
        """Return the circuit breaker's state at `now`."""
        return self._breaker.state(now)

    def capacity(self, now: float) -> int:
        """Return how many calls may run at once now, those that run included.

        0 while the breaker is open or the server has asked for a pause, 1 (the probe) while the
        breaker is half-open.
        """
        state = self._breaker.state(now)
        if state == "open" or now < self._paused_until:
            return 0
        return 1 if state == "half_open" else int(self._limit)
