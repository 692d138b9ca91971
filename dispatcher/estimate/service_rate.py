"""The rate at which a busy fleet serves, and the wait of a new request by it. Pure."""

import math

from dispatcher.estimate.moving_averages import DecayingRatio

SMOOTHING_SECONDS = 60.0
GUESSED_SECONDS = 45.0  # for a full fleet to serve what it holds, before anything is known
FULL_FLEET_FACTOR = 2.0  # a request takes so many times longer when the fleet is full
MIN_GUESS_SECONDS = 0.01
GUESS_WEIGHT = 1.0  # the guess counts as so many measured seconds of each worker
MEMORY_REQUESTS = 200  # about so many requests count
DEFAULT_CHARGE = 2.0  # virtual tokens per reserved token, if all of them were generated
MIN_ESTIMATE_SECONDS = 0.5  # errors of shorter estimates tell nothing about long ones
MEASURED_SECONDS = 5.0  # with a backlog, per worker; before, errors are those of the guess
TRUSTED_SECONDS = 20.0  # weight of the prior, in estimated seconds, against the first errors
DEFAULT_UNCERTAINTY = 0.5  # fraction of an estimated wait, before any wait has ended
CORRECTION_RANGE = 0.5, 3.0


class ServiceRate:
    """Reserved tokens that the fleet frees per second and worker, learned while requests wait.

    An idle fleet serves little because it is asked little; what it then serves says nothing about
    what it could. So only intervals that began and ended with a backlog count, and recent ones
    count more: both sums, of tokens and of seconds, fade by 1/e in `SMOOTHING_SECONDS`. The seconds
    are those of each worker, so that a worker that joins or leaves counts from its first moment.

    What the sums leave out (requests that overtake, caps, trickles) shows in how long requests have
    waited against their estimates: all estimates are corrected by that ratio.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0
        self._freed_tokens = 0
        self._ticked_at: float | None = None
        self._backlogged = False
        self._workers = 1
        self._guess = 0.0  # tokens per second and worker; 0: none
        self._charge = DecayingRatio(MEMORY_REQUESTS, prior=DEFAULT_CHARGE)
        self._correction = DecayingRatio(MEMORY_REQUESTS, prior=1.0, weight=TRUSTED_SECONDS)
        self._squared_errors = DecayingRatio(
            MEMORY_REQUESTS, prior=DEFAULT_UNCERTAINTY**2, weight=TRUSTED_SECONDS**2
        )

    def record_freed(self, tokens: int) -> None:
        """Count reserved tokens that came free in the fleet since the last tick."""
        self._freed_tokens += tokens

    def record_service(self, service: int, cost: int) -> None:
        """Learn the service, in virtual tokens, that a request of this reserved cost has taken."""
        self._charge.add(service, cost)

    def record_wait(self, estimated_seconds: float, seconds: float) -> None:
        """Learn from a dispatched request: its estimated wait at acceptance, and its real one."""
        measured = self._seconds >= MEASURED_SECONDS * self._workers
        if measured and estimated_seconds >= MIN_ESTIMATE_SECONDS:
            self._squared_errors.add((seconds - estimated_seconds) ** 2, estimated_seconds**2)
            self._correction.add(seconds * self.correction, estimated_seconds)

    @property
    def uncertainty(self) -> float:
        """The error of estimated waits as a fraction of the estimate (root mean square)."""
        return math.sqrt(self._squared_errors.value)

    def tick(
        self,
        now: float,
        backlogged: bool,
        workers: int = 1,
        capacity_tokens: float = 0.0,
        request_seconds: float | None = None,
    ) -> None:
        """Close an interval and begin the next; call it regularly.

        `capacity_tokens` are the reserved tokens that the fleet has room for; 0 gives no guess.
        `request_seconds` are the seconds that a request has taken, if known: by Little's law the
        capacity is then served in as long, and in longer when it is full.
        """
        elapsed = 0.0 if self._ticked_at is None else now - self._ticked_at
        if self._backlogged and backlogged and elapsed > 0 and workers:
            decay = math.exp(-elapsed / SMOOTHING_SECONDS)
            self._tokens = self._tokens * decay + self._freed_tokens
            self._seconds = self._seconds * decay + elapsed * workers
        self._freed_tokens, self._ticked_at, self._backlogged = 0, now, backlogged
        self._workers = (
            workers or self._workers
        )  # without workers the last number stays: they may return
        seconds = (
            GUESSED_SECONDS
            if request_seconds is None
            else min(GUESSED_SECONDS, FULL_FLEET_FACTOR * request_seconds)
        )
        self._guess = capacity_tokens / max(MIN_GUESS_SECONDS, seconds) / self._workers

    @property
    def charge_per_token(self) -> float:
        """The service, in virtual tokens, that a reserved token has turned out to be."""
        return self._charge.value

    @property
    def correction(self) -> float:
        """The factor by which requests wait longer than the backlog alone says, within limits."""
        least, most = CORRECTION_RANGE
        return min(max(least, self._correction.value), most)

    @property
    def seconds_per_token(self) -> float | None:
        """The seconds by which a reserved token ahead delays a request; None if nothing is known.

        A fleet that has filled at once frees nothing for as long as requests take: until it does,
        it is at most half as fast as guessed.
        """
        weight = GUESS_WEIGHT if self._guess else 0.0
        tokens = self._tokens + weight * self._guess
        if tokens <= 0:
            return None
        seconds = self._seconds if self._tokens > 0 else min(self._seconds, weight)
        return (seconds + weight) / tokens / self._workers * self.correction

    def estimate_wait(self, tokens_ahead: float) -> float | None:
        """Estimated seconds behind `tokens_ahead` reserved tokens; None while nothing is known."""
        if tokens_ahead == 0:
            return 0.0
        seconds = self.seconds_per_token
        return None if seconds is None else tokens_ahead * seconds
