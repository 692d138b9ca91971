"""Decides when the next call may begin: concurrency limit, Retry-After pauses, breaker. Pure.

The limit rises by one for each round of calls that are answered. Each call that the server refuses
because it has too much to do takes a half, so that it falls by the share that was refused (as in
DCTCP, RFC 8257): a round in which all are refused halves it, a server that refuses some calls at
any load keeps it.

The ceiling is the most calls at which the server has answered lately, once it has refused one that
began beside more. From there on the limit rises by a tenth for each round: that is how often it is
tried whether more would do. A Retry-After holds back every call, not only the one that got it.
"""

from collections import deque

from gpu_worker.engines.remote.call_errors import RetryableError
from gpu_worker.engines.remote.circuit_breaker import FOREVER, BreakerState, CircuitBreaker

_REFUSAL_STEP = 0.5
_PROBING_STEP = 0.1  # for each round of calls, from the ceiling on
_ROUNDS = 2  # that are counted as lately


class ConcurrencyLimiter:
    """Decides when the next call to one server may begin; at most `concurrency` run at once.

    The limit falls when the server is overloaded and grows again with each answer; the circuit
    breaker and the server's Retry-After also hold calls back. Calls are told apart by numbers.
    `now` is in seconds of any one clock.
    """

    def __init__(self, concurrency: int, breaker: CircuitBreaker) -> None:
        self._max_limit, self._limit = concurrency, float(concurrency)
        self._breaker = breaker
        self._calls: dict[int, int] = {}  # with how many ran when it began, itself included
        self._answered: deque[int] = deque(maxlen=_ROUNDS * concurrency)  # the same, of these
        self._ceiling = float(concurrency)
        self._last_number = 0
        self._paused_until = -FOREVER

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
        self._calls[self._last_number] = len(self._calls) + 1
        return self._last_number

    def record_answer(self, call: int) -> None:
        """Record that the server has begun to answer this call, or has rejected its request.

        Either shows that the server works. Call this at most once per call. The call counts as
        running until `release`.
        """
        self._breaker.record_success(call)
        beside = self._calls[call]
        self._answered.append(beside)
        # a refused call that has just ended may have been counted beside it: no more than the limit
        self._ceiling = max(self._ceiling, float(min(beside, int(self._limit))))
        step = 1.0 if self._limit < self._ceiling else _PROBING_STEP
        self._limit = min(float(self._max_limit), self._limit + step / self._limit)

    def record_failure(self, call: int, error: RetryableError, now: float) -> None:
        """Record that a call failed with `error`, which may hold back the calls after it.

        A Retry-After pauses all calls; an overload lowers the limit; a
        server that does not work brings the circuit breaker closer to opening. The call counts as
        running until `release`.
        """
        self._paused_until = max(self._paused_until, now + error.retry_after)
        if error.throttles:
            self._lower_limit(self._calls[call])
        if error.alive:
            self._breaker.record_success(call)
        else:
            self._breaker.record_failure(call, now)

    def _lower_limit(self, beside: int) -> None:
        """Lower the limit for a refused call that began as the last of so many."""
        most_answered = max(self._answered, default=0)
        if 0 < most_answered < beside:
            self._ceiling = float(most_answered)
            self._limit = min(self._limit, self._ceiling)
        else:
            self._limit = max(1.0, self._limit - _REFUSAL_STEP)

    def release(self, call: int) -> None:
        """Stop counting a call as running, however it went. Idempotent."""
        self._calls.pop(call, None)
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
