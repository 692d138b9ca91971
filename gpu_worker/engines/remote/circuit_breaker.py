"""The circuit breaker: it spares a server that fails, and who would wait for it in vain. Pure.

Closed, calls begin freely. After `failures` in a row it opens: no call begins until a cool-down is
over. Then it is half-open: one call, the probe, may begin. Its success closes the breaker; its
failure opens it again, each time for twice as long. Only the probe counts while it is not closed:
what began earlier says nothing about now.
"""

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]
FOREVER = float("inf")


class CircuitBreaker:
    """Times are seconds of any one clock, given by the caller; calls have numbers."""

    def __init__(
        self, failures: int = 5, cooldown_seconds: float = 1.0, most_seconds: float = 30.0
    ) -> None:
        self._allowed, self._first, self._most = failures, cooldown_seconds, most_seconds
        self._failures = 0
        self._cooldown = cooldown_seconds
        self._opened_until: float | None = None
        self._probe: int | None = None

    def state(self, now: float) -> BreakerState:
        if self._opened_until is None:
            return "closed"
        return "open" if now < self._opened_until else "half_open"

    def wait_seconds(self, now: float) -> float:
        """Seconds until a call may begin: 0 is now, `FOREVER` when the probe has to tell."""
        if self._probe is not None:
            return FOREVER
        return 0.0 if self._opened_until is None else max(0.0, self._opened_until - now)

    def acquire(self, call: int, now: float) -> None:
        """A call begins, which `wait` must have allowed; in the half-open state it is the probe."""
        assert self.wait_seconds(now) == 0, (
            f"call {call} begins while the breaker is {self.state(now)}"
        )
        if self._opened_until is not None:
            self._probe = call

    def record_success(self, call: int) -> None:
        """The server has answered this call."""
        if self._opened_until is None:
            self._failures = 0
        elif call == self._probe:
            self._opened_until, self._probe = None, None
            self._failures, self._cooldown = 0, self._first

    def record_failure(self, call: int, now: float) -> None:
        """This call has met a server that does not work."""
        if self._opened_until is None:
            self._failures += 1
            if self._failures >= self._allowed:
                self._opened_until = now + self._cooldown
        elif call == self._probe:
            self._cooldown = min(self._most, 2 * self._cooldown)
            self._opened_until, self._probe = now + self._cooldown, None

    def release(self, call: int) -> None:
        """This call was given up and says nothing: the next one is the probe. Idempotent."""
        if call == self._probe:
            self._probe = None
