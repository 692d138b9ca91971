"""The state of one tenant: its weight, counter, load and demand. Pure."""

from dataclasses import dataclass, field
from math import exp

DECAY_SECONDS = 30.0  # demand fades by 1/e in this time
MEAN_WINDOW_REQUESTS = 20  # a running mean is over about this many requests


def dominant_tokens(requests: int, tokens: int, tokens_per_sequence: float) -> float:
    """Return the size of some requests in tokens: the larger of their two uses of a fleet.

    These are the tokens that they reserve, and their sequences' worth of tokens: `requests` times
    `tokens_per_sequence`, the fleet's KV tokens over the sequences that it can run at once.
    """
    sequence_tokens = requests * tokens_per_sequence
    return max(sequence_tokens, tokens)


@dataclass(slots=True)
class RequestTotals:
    """A number of requests and the tokens that they reserve together."""

    requests: int = 0
    tokens: int = 0

    def add(self, cost: int) -> None:
        """Count a request that reserves `cost` tokens."""
        self.requests += 1
        self.tokens += cost

    def remove(self, cost: int) -> None:
        """Stop counting a request that reserves `cost` tokens."""
        self.requests -= 1
        self.tokens -= cost

    def dominant_tokens(self, tokens_per_sequence: float) -> float:
        """Return the size of these requests, as the function `dominant_tokens` does.

        It is the larger of their reserved tokens and their number times `tokens_per_sequence`.
        """
        return dominant_tokens(self.requests, self.tokens, tokens_per_sequence)


@dataclass(slots=True)
class DecayingFlow:
    """The sizes of recent requests, as decaying sums of the sizes and of their squares.

    Sizes are tokens. Both sums are as of the time `at`, in the caller's seconds, and fade by 1/e in
    `DECAY_SECONDS`.
    """

    sizes: float = 0.0
    squares: float = 0.0
    at: float = 0.0

    def add(self, size: float, now: float) -> None:
        """Fade the sums until `now`, then add a request of this size."""
        self.decay(now)
        self.sizes += size
        self.squares += size * size

    def merge(self, other: "DecayingFlow", sign: int) -> None:
        """Add another flow's sums to this one's (`sign` +1) or subtract them (-1), never below 0.

        Both flows are first faded to the later of their two times, so that `other` changes, too.
        """
        self.decay(other.at)
        other.decay(self.at)
        self.sizes = max(0.0, self.sizes + sign * other.sizes)
        self.squares = max(0.0, self.squares + sign * other.squares)

    def decay(self, now: float) -> None:
        """Fade the sums until `now`; a time before `at` changes nothing."""
        if now > self.at:
            fading = exp((self.at - now) / DECAY_SECONDS)
            self.sizes, self.squares, self.at = self.sizes * fading, self.squares * fading, now

    @property
    def effective_requests(self) -> float:
        """The number of equally large requests that would give these two sums; 0 without any."""
        return self.sizes * self.sizes / self.squares if self.squares else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second that recent requests have asked for."""
        return self.sizes / DECAY_SECONDS

    @property
    def square_rate(self) -> float:
        """Squared tokens per second: the rate at which the squares of request sizes come in."""
        return self.squares / DECAY_SECONDS


@dataclass(slots=True)
class RunningMean:
    """A mean over about the last `MEAN_WINDOW_REQUESTS` values.

    `count` is the number of values so far, at most that many.
    """

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Include one more value in the mean; once the window is full, older values count less."""
        self.count = min(MEAN_WINDOW_REQUESTS, self.count + 1)
        self.value += (value - self.value) / self.count


@dataclass(slots=True, eq=False)
class TenantState:
    """A leader's record of one tenant of its model.

    Loads are numbers of requests and the tokens that they reserve. `queued_load`, `in_flight_load`
    and `demand` leave out batch work, which fills what is left. `is_above_share` is True if the
    tenant asks for more than its fair share of the fleet, or has got more.
    """

    weight: float = 1.0
    reserved_tokens: int = 0
    counter: float = 0.0  # service in virtual tokens, over the weight
    queued_requests: int = 0  # requests of every priority
    queued_load: RequestTotals = field(default_factory=RequestTotals)
    in_flight_load: RequestTotals = field(default_factory=RequestTotals)
    demand: DecayingFlow = field(default_factory=DecayingFlow)
    mean_output: RunningMean = field(default_factory=RunningMean)  # generated per request
    is_above_share: bool = False
