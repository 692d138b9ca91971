"""How fast a model's fleet serves while it is busy, so how long a request would wait. Pure."""

import math

SMOOTHING_SECONDS = 5.0


class Pace:
    """Reserved tokens released per second, learned only while requests wait.

    An idle fleet serves little because it is asked little; what it then serves says nothing about
    what it could. So only intervals that began and ended with a backlog count, and recent ones
    count more: both sums, of tokens and of seconds, fade by 1/e in `SMOOTHING_SECONDS`.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0
        self._released = 0
        self._at: float | None = None
        self._backlogged = False

    def release(self, cost: int) -> None:
        """A request of this reserved cost has left the fleet."""
        self._released += cost

    def tick(self, now: float, backlogged: bool) -> None:
        """Close an interval; call it regularly."""
        elapsed = 0.0 if self._at is None else now - self._at
        if self._backlogged and backlogged and elapsed > 0:
            fading = math.exp(-elapsed / SMOOTHING_SECONDS)
            self._tokens = self._tokens * fading + self._released
            self._seconds = self._seconds * fading + elapsed
        self._released, self._at, self._backlogged = 0, now, backlogged

    def wait_seconds(self, tokens_ahead: int) -> float | None:
        """Estimated wait behind `tokens_ahead` reserved tokens; None while nothing is known."""
        if tokens_ahead == 0:
            return 0.0
        return tokens_ahead * self._seconds / self._tokens if self._tokens else None
