"""The circuit breaker stops calls to a server that fails, until a probe succeeds. Pure.

While it is closed, calls begin freely. After `failures` in a row it opens: no call begins until a
cool-down is over. Then it is half-open: one call, the probe, may begin. Its success closes the
breaker; its failure opens it again, each time for twice as long. While the breaker is not closed
only the probe counts: calls that began earlier say nothing about the server now.
"""

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]
FOREVER = float("inf")


class CircuitBreaker:
    """Decides when a call to one server may begin, by how earlier calls ended.

    Closed, it lets calls begin freely. After `failures` in a row it opens, and none begins for a
    cool-down: `cooldown_seconds`, doubled up to `max_seconds` at each failed probe. Then it is
    half-open: one call, the probe, may begin, and decides whether the breaker closes or opens
    again. `now` is in seconds of any one clock; calls are told apart by numbers.
    """

    def __init__(
        self, failures: int = 5, cooldown_seconds: float = 1.0, max_seconds: float = 30.0
    ) -> None:
        self._failure_threshold = failures
        self._initial_cooldown, self._max_cooldown = cooldown_seconds, max_seconds
        self._failures = 0
        self._cooldown = cooldown_seconds
        self._opened_until: float | None = None
        self._probe: int | None = None

    def state(self, now: float) -> BreakerState:
        """Return the state at `now`; an open breaker is half-open once its cool-down is over."""
        if self._opened_until is None:
            return "closed"
        return "open" if now < self._opened_until else "half_open"

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until a call may begin: 0 is now, infinite until the probe ends."""
        if self._probe is not None:
            return FOREVER
        return 0.0 if self._opened_until is None else max(0.0, self._opened_until - now)

    def acquire(self, call: int, now: float) -> None:
        """Record that a call begins, which is allowed only while `wait_seconds` returns 0.

        A call that begins in the half-open state is the probe.
        """
        assert self.wait_seconds(now) == 0, (
            f"call {call} begins while the breaker is {self.state(now)}"
        )
        if self._opened_until is not None:
            self._probe = call

    def record_success(self, call: int) -> None:
        """Record that the server answered this call.

        While the breaker is closed, failures are counted from zero again. While it is not, an
        answer to the probe closes it, and an answer to an older call changes nothing.
        """
        if self._opened_until is None:
            self._failures = 0
        elif call == self._probe:
            self._opened_until, self._probe = None, None
            self._failures, self._cooldown = 0, self._initial_cooldown

    def record_failure(self, call: int, now: float) -> None:
        """Record that this call failed because the server does not work.

        While the breaker is closed, the last of `failures` in a row opens it. While it is not, a
        failed probe opens it for twice as long as before, and a failed older call changes nothing.
        """
        if self._opened_until is None:
            self._failures += 1
            if self._failures >= self._failure_threshold:
                self._opened_until = now + self._cooldown
        elif call == self._probe:
            self._cooldown = min(self._max_cooldown, 2 * self._cooldown)
            self._opened_until, self._probe = now + self._cooldown, None

    def release(self, call: int) -> None:
        """End a call that has neither succeeded nor failed, such as a cancelled one.

        `call` is the number that it got as it began. If it was the probe, the next call is the
        probe. Idempotent; changes nothing after a success or a failure of the call.
        """
        if call == self._probe:
            self._probe = None
