"""How fast a model's fleet serves while it is busy, so how long a request would wait. Pure."""

import math

from dispatcher.estimate.moving_averages import DecayingRatio

SMOOTHING_SECONDS = 60.0
GUESSED_SECONDS = 45.0  # in which a fleet serves what it has room for, before anything is known
FULL_FLEET_FACTOR = 2.0  # times as long as before takes a request in a fleet that is full
LEAST_SECONDS = 0.01
GUESS_WEIGHT = 1.0  # seconds of each worker that the guess counts for
MEMORY_REQUESTS = 200  # requests
DEFAULT_CHARGE = 2.0  # virtual tokens per reserved one, were it all generated
LEAST_TOLD_SECONDS = 0.5  # below, an estimate's error says nothing about those that matter
MEASURED_SECONDS = 5.0  # of a queue, in which errors tell of the guess and not of estimates
TRUSTED_SECONDS = 20.0  # of told waits, against which the first errors weigh little
DEFAULT_UNCERTAINTY = 0.5  # of a wait, before any has come to its end
CORRECTION_RANGE = 0.5, 3.0  # at most


class ServiceRate:
    """Reserved tokens released per second, learned only while requests wait.

    An idle fleet serves little because it is asked little; what it then serves says nothing about
    what it could. So only intervals that began and ended with a backlog count, and recent ones
    count more: both sums, of tokens and of seconds, fade by 1/e in `SMOOTHING_SECONDS`. The seconds
    are those of each worker, so that a worker that joins or leaves counts from its first moment.

    What the sums leave out (requests that overtake, caps, trickles) shows in how long requests
    have waited against what they were told: all estimates are corrected by that.
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
        """So many reserved tokens have come free in the fleet."""
        self._freed_tokens += tokens

    def record_service(self, service: int, cost: int) -> None:
        """The service that a request of this reserved cost has taken."""
        self._charge.add(service, cost)

    def record_wait(self, told_seconds: float, seconds: float) -> None:
        """A request was dispatched: how long it was told to wait, and how long it has."""
        measured = self._seconds >= MEASURED_SECONDS * self._workers
        if measured and told_seconds >= LEAST_TOLD_SECONDS:
            self._squared_errors.add((seconds - told_seconds) ** 2, told_seconds**2)
            self._correction.add(seconds * self.correction, told_seconds)

    @property
    def uncertainty(self) -> float:
        """How far waits are from what was told, as a share of it (root of the mean square)."""
        return math.sqrt(self._squared_errors.value)

    def tick(
        self,
        now: float,
        backlogged: bool,
        workers: int = 1,
        room: float = 0.0,
        lasting: float | None = None,
    ) -> None:
        """Close an interval; call it regularly.

        `room` is for how many reserved tokens the fleet has places; without it nothing is guessed.
        `lasting` are the seconds that a request has taken, if that is known: by Little's law the
        room is then served in as long, and when it is full in longer.
        """
        elapsed = 0.0 if self._ticked_at is None else now - self._ticked_at
        if self._backlogged and backlogged and elapsed > 0 and workers:
            fading = math.exp(-elapsed / SMOOTHING_SECONDS)
            self._tokens = self._tokens * fading + self._freed_tokens
            self._seconds = self._seconds * fading + elapsed * workers
        self._freed_tokens, self._ticked_at, self._backlogged = 0, now, backlogged
        self._workers = workers or self._workers  # they may come back: until then as it was
        seconds = (
            GUESSED_SECONDS
            if lasting is None
            else min(GUESSED_SECONDS, FULL_FLEET_FACTOR * lasting)
        )
        self._guess = room / max(LEAST_SECONDS, seconds) / self._workers

    @property
    def charge_per_token(self) -> float:
        """The service, in virtual tokens, that a reserved token has turned out to be."""
        return self._charge.value

    @property
    def correction(self) -> float:
        """By how much longer requests wait than the backlog alone says."""
        least, most = CORRECTION_RANGE
        return min(max(least, self._correction.value), most)

    @property
    def seconds_per_token(self) -> float | None:
        """How long a reserved token ahead makes a request wait; None while nothing is known.

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
        """Estimated wait behind `tokens_ahead` reserved tokens; None while nothing is known."""
        if tokens_ahead == 0:
            return 0.0
        seconds = self.seconds_per_token
        return None if seconds is None else tokens_ahead * seconds
