"""The rate at which a busy fleet serves, and the wait of a new request by it. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from dispatcher.estimate.moving_averages import DecayingRatio

SMOOTHING_SECONDS = 60.0
FULL_FLEET_FACTOR = 2.0  # a request takes so many times longer when the fleet is full
FIRST_END_FACTOR = 1.5  # of a request's seconds, until a fleet that has filled at once frees room
EARLY_SECONDS = 0.2  # with a backlog; before, the progress of requests tells too little
EARLY_WEIGHT = 1.0  # the early rate counts as so many measured seconds of each worker
MEMORY_REQUESTS = 200  # about so many requests count
DEFAULT_CHARGE = 2.0  # virtual tokens per reserved token, if all of them were generated
MIN_ESTIMATE_SECONDS = 0.5  # errors of shorter estimates tell nothing about long ones
MEASURED_SECONDS = 5.0  # with a backlog, per worker; before, errors are those of the early rate
TRUSTED_SECONDS = 20.0  # weight of the prior, in estimated seconds, against the first errors
DEFAULT_UNCERTAINTY = 0.5  # fraction of an estimated wait, before any wait has ended
CORRECTION_RANGE = 0.5, 3.0


@dataclass
class RateSums:
    """Decaying sums of reserved tokens and of seconds, from which a `ServiceRate` takes its rates.

    A request reserves its prompt tokens plus the most that it may generate. `progress` and
    `held_seconds` are summed at all times, the others only while requests wait in the queue.
    `seconds` are counted for each worker; `backlogged_seconds` are those of the clock and do not
    decay.
    """

    progress: float = 0.0  # tokens by which requests in flight advanced
    held_seconds: float = 0.0  # token seconds of these requests meanwhile
    advanced: float = 0.0  # as `progress`, while requests wait
    freed: float = 0.0  # tokens that came free
    seconds: float = 0.0
    backlogged_seconds: float = 0.0

    @property
    def request_seconds(self) -> float:
        """Mean seconds that a request takes, by Little's law; 0 while no request has advanced."""
        return self.held_seconds / self.progress if self.progress else 0.0


@dataclass(frozen=True)
class RateCheckpoint:
    """All that a `ServiceRate` has learned, to be stored for the model's next leader.

    It has the sums, and the numerator and denominator of each decaying ratio.
    """

    sums: RateSums
    charge: tuple[float, float]
    correction: tuple[float, float]
    squared_errors: tuple[float, float]

    @classmethod
    def from_wire(cls, wire: Any) -> Self:
        """Return the checkpoint that an unpacked map holds.

        Sums that are missing begin at zero. Raises TypeError for a missing ratio or an unknown
        field, as in a checkpoint of another release.
        """
        ratios = {name: tuple(each) for name, each in wire.items() if name != "sums"}
        return cls(RateSums(**wire.get("sums", {})), **ratios)


class ServiceRate:
    """Estimates waits from the rate at which a model's workers free reserved tokens.

    A request reserves its prompt tokens plus the most that it may generate; they come free when it
    ends. The rate is in reserved tokens per second and worker. The model's leader calls `tick`
    regularly and reports events in between. Times are seconds of any one monotonic clock.

    An idle fleet serves little because it is asked little; what it then serves says nothing about
    what it could. So only intervals that began and ended with requests waiting count, and recent
    ones count more: both sums, of tokens and of seconds, fade by 1/e in `SMOOTHING_SECONDS`. The
    seconds are those of each worker, so that a worker that joins or leaves counts from its first
    moment.

    A fleet that was filled all at once frees nothing until its first requests end. Until then, the
    rate is the one at which its requests advance, or follows by Little's law from how long they
    take; and a wait is no shorter than the time until the first of them are expected to end. Before
    any request has advanced nothing is estimated, and so no request is refused for its wait.

    These sums leave out requests that overtake others, and limits kept for some tenants. Both show
    in how long requests have really waited, so all estimates are multiplied by `correction`, the
    ratio of real to estimated waits.
    """

    def __init__(self) -> None:
        self._sums = RateSums()
        self._freed_since_tick, self._advanced_since_tick = 0, 0.0
        self._ticked_at: float | None = None
        self._backlogged = False
        self._workers = 1
        self._capacity_tokens = 0.0
        # The prior weighs as one token: requests that end before they run were charged nothing
        self._charge = DecayingRatio(MEMORY_REQUESTS, prior=DEFAULT_CHARGE, weight=1.0)
        self._correction = DecayingRatio(MEMORY_REQUESTS, prior=1.0, weight=TRUSTED_SECONDS)
        self._squared_errors = DecayingRatio(
            MEMORY_REQUESTS, prior=DEFAULT_UNCERTAINTY**2, weight=TRUSTED_SECONDS**2
        )

    def record_freed(self, tokens: int) -> None:
        """Count reserved tokens that came free on the fleet since the last `tick`.

        The next `tick` adds them to the rate if requests have waited in the meantime.
        """
        self._freed_since_tick += tokens

    def record_advanced(self, tokens: float) -> None:
        """Count reserved tokens as done, as a request in flight gets nearer to its end.

        `tokens` are the request's reserved tokens times the part of its expected work that was done
        since the last such call. A request of 100 reserved tokens, half of whose work was done,
        counts 50.
        """
        self._advanced_since_tick += tokens

    def record_service(self, service: int, cost: int) -> None:
        """Learn that an ended request, which had reserved `cost` tokens, has taken `service`.

        `service` is in virtual tokens: prompt tokens plus twice the generated tokens. The mean of
        such ratios is `charge_per_token`.
        """
        self._charge.add(service, cost)

    def record_wait(self, estimated_seconds: float, seconds: float) -> None:
        """Learn from a dispatched request: the wait estimated at its acceptance, and its real wait.

        Estimates below `MIN_ESTIMATE_SECONDS` (0.5 s) are ignored. So is every wait until the rate
        has been measured for `MEASURED_SECONDS` (5 s) of each worker, because errors before that
        are those of the early rate, which is taken before requests end.
        """
        measured = self._sums.seconds >= MEASURED_SECONDS * self._workers
        if measured and estimated_seconds >= MIN_ESTIMATE_SECONDS:
            self._squared_errors.add((seconds - estimated_seconds) ** 2, estimated_seconds**2)
            self._correction.add(seconds * self.correction, estimated_seconds)

    @property
    def uncertainty(self) -> float:
        """Root mean square error of estimated waits, as a fraction of the estimate.

        It is `DEFAULT_UNCERTAINTY` (0.5) until waits have been compared with their estimates.
        """
        return math.sqrt(self._squared_errors.value)

    def tick(
        self,
        now: float,
        backlogged: bool,
        workers: int = 1,
        capacity_tokens: float = 0.0,
        in_flight_tokens: int = 0,
    ) -> None:
        """End the interval that the last call began, and begin the next; call it regularly.

        `now` is monotonic seconds, `backlogged` says whether requests wait now, and `workers` is
        how many workers there are. `capacity_tokens` are the reserved tokens that the whole fleet
        has room for, and `in_flight_tokens` those of the requests that it has. The rate counts the
        interval only if requests waited at both of its ends and there are workers.
        """
        elapsed = 0.0 if self._ticked_at is None else now - self._ticked_at
        if elapsed > 0 and workers:
            with_backlog = self._backlogged and backlogged
            self._add_interval(elapsed, workers, in_flight_tokens, with_backlog)
        self._freed_since_tick, self._advanced_since_tick = 0, 0.0
        self._ticked_at, self._backlogged = now, backlogged
        self._capacity_tokens = capacity_tokens
        self._workers = (
            workers or self._workers
        )  # without workers the last number stays: they may return

    def _add_interval(
        self, elapsed: float, workers: int, in_flight_tokens: int, with_backlog: bool
    ) -> None:
        sums, decay = self._sums, math.exp(-elapsed / SMOOTHING_SECONDS)
        advanced = self._advanced_since_tick
        if in_flight_tokens or advanced:
            sums.progress = sums.progress * decay + advanced
            sums.held_seconds = sums.held_seconds * decay + elapsed * in_flight_tokens
        if with_backlog:
            sums.freed = sums.freed * decay + self._freed_since_tick
            sums.advanced = sums.advanced * decay + advanced
            sums.seconds = sums.seconds * decay + elapsed * workers
            sums.backlogged_seconds += elapsed

    @property
    def charge_per_token(self) -> float:
        """Mean service of ended requests, in virtual tokens, per token that they had reserved.

        It is `DEFAULT_CHARGE` (2) before any request has ended, and always above 0.
        """
        return self._charge.value

    @property
    def correction(self) -> float:
        """Factor by which requests wait longer than the tokens queued ahead of them suggest.

        It is learned from real waits and kept within `CORRECTION_RANGE` (0.5 to 3); 1 before any
        wait is known.
        """
        least, most = CORRECTION_RANGE
        return min(max(least, self._correction.value), most)

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds by which each reserved token queued ahead of a request delays it.

        None while no rate is known. The estimate is already multiplied by `correction`.
        """
        sums, early_rate = self._sums, self._early_rate
        tokens = sums.freed + EARLY_WEIGHT * early_rate
        if tokens <= 0:
            return None
        seconds = sums.seconds if sums.freed > 0 else 0.0
        seconds += EARLY_WEIGHT if early_rate else 0.0
        return seconds / tokens / self._workers * self.correction

    @property
    def _early_rate(self) -> float:
        """Tokens per second and worker, as known before anything came free; 0 while unknown."""
        sums = self._sums
        if sums.advanced > 0 and sums.backlogged_seconds >= EARLY_SECONDS:
            return sums.advanced / sums.seconds
        if not sums.request_seconds:
            return 0.0
        return self._capacity_tokens / (FULL_FLEET_FACTOR * sums.request_seconds) / self._workers

    @property
    def _seconds_to_first_end(self) -> float:
        """The seconds until a fleet that has filled for the first time is expected to free room."""
        sums = self._sums
        return max(0.0, FIRST_END_FACTOR * sums.request_seconds - sums.backlogged_seconds)

    def estimate_wait(self, tokens_ahead: float) -> float | None:
        """Return the estimated seconds that a request waits behind `tokens_ahead` reserved tokens.

        0.0 if no tokens are ahead; None if some are and the rate is not known yet. If the fleet has
        just been filled, this includes the time until its first requests are expected to end.
        """
        if tokens_ahead == 0:
            return 0.0
        seconds = self.seconds_per_token
        return None if seconds is None else self._seconds_to_first_end + tokens_ahead * seconds

    def capture(self) -> RateCheckpoint:
        """Return a copy of all that was learned, for `restore` in the model's next leader."""
        return RateCheckpoint(
            replace(self._sums), self._charge.sums, self._correction.sums, self._squared_errors.sums
        )

    def restore(self, saved: RateCheckpoint) -> None:
        """Replace all that was learned by what an earlier leader had learned."""
        self._sums = replace(saved.sums)
        self._charge.sums, self._correction.sums = saved.charge, saved.correction
        self._squared_errors.sums = saved.squared_errors
