"""The state of one tenant: its weight, counter, load and demand. Pure."""

from dataclasses import dataclass, field
from math import exp

DECAY_SECONDS = 30.0  # demand fades by 1/e in this time
MEAN_WINDOW_REQUESTS = 20  # a running mean is over about this many requests


def dominant_tokens(requests: int, tokens: int, tokens_per_sequence: float) -> float:
    """The size of some requests: the larger of `tokens` and their sequences' worth of tokens.

    `tokens_per_sequence` is the fleet's KV tokens over its sequences: each request counts as that
    many tokens at least.
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
        """The size of these requests in tokens (see the function `dominant_tokens`)."""
        return dominant_tokens(self.requests, self.tokens, tokens_per_sequence)


@dataclass(slots=True)
class DecayingFlow:
    """Decaying sums of request sizes and of their squares, as of the time `at`.

    Sizes are tokens. Both sums fade by 1/e in `DECAY_SECONDS`.
    """

    sizes: float = 0.0
    squares: float = 0.0
    at: float = 0.0

    def add(self, size: float, now: float) -> None:
        """Add a request of this size at the time `now`."""
        self.decay(now)
        self.sizes += size
        self.squares += size * size

    def merge(self, other: "DecayingFlow", sign: int) -> None:
        """Add another flow (`sign` +1) or subtract it (-1), as of the later time of the two."""
        self.decay(other.at)
        other.decay(self.at)
        self.sizes = max(0.0, self.sizes + sign * other.sizes)
        self.squares = max(0.0, self.squares + sign * other.squares)

    def decay(self, now: float) -> None:
        """Let the sums fade until `now`; a time in the past changes nothing."""
        if now > self.at:
            fading = exp((self.at - now) / DECAY_SECONDS)
            self.sizes, self.squares, self.at = self.sizes * fading, self.squares * fading, now

    @property
    def effective_requests(self) -> float:
        """The number of equally large requests that would give these two sums."""
        return self.sizes * self.sizes / self.squares if self.squares else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.sizes / DECAY_SECONDS

    @property
    def square_rate(self) -> float:
        """Squared tokens per second."""
        return self.squares / DECAY_SECONDS


@dataclass(slots=True)
class RunningMean:
    """A mean over about the last `MEAN_WINDOW_REQUESTS` values; `count` stops at that number."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take one more value into the mean."""
        self.count = min(MEAN_WINDOW_REQUESTS, self.count + 1)
        self.value += (value - self.value) / self.count


@dataclass(slots=True, eq=False)
class TenantState:
    """A leader's record of one tenant of its model.

    `queued_load`, `in_flight_load` and `demand` leave out batch work, which fills what is left.
    `is_above_share`: the tenant asks for more than its share of the fleet, or has got more.
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
