"""What is kept of each tenant: its terms and service, what it waits for and holds. Pure."""

from dataclasses import dataclass, field
from math import exp

DECAY_SECONDS = 30.0  # what was asked for fades by 1/e in this time
MEAN_WINDOW_REQUESTS = 20  # a mean is over about so many requests


def dominant_tokens(requests: int, tokens: int, place: float) -> float:
    """The room that requests take, in tokens, where each needs `place` at least."""
    places = requests * place
    return max(places, tokens)


@dataclass(slots=True)
class RequestTotals:
    """Some requests and the tokens that they reserve."""

    requests: int = 0
    tokens: int = 0

    def add(self, cost: int) -> None:
        self.requests += 1
        self.tokens += cost

    def remove(self, cost: int) -> None:
        self.requests -= 1
        self.tokens -= cost

    def dominant_tokens(self, place: float) -> float:
        """The room that it takes, in tokens."""
        return dominant_tokens(self.requests, self.tokens, place)


@dataclass(slots=True)
class DecayingFlow:
    """Sizes that come or go over time: their sum and that of their squares, both fading."""

    sizes: float = 0.0
    squares: float = 0.0
    at: float = 0.0

    def add(self, size: float, now: float) -> None:
        self.decay(now)
        self.sizes += size
        self.squares += size * size

    def merge(self, other: "DecayingFlow", sign: int) -> None:
        """Add another's, or take it away, as of the later of the two."""
        self.decay(other.at)
        other.decay(self.at)
        self.sizes = max(0.0, self.sizes + sign * other.sizes)
        self.squares = max(0.0, self.squares + sign * other.squares)

    def decay(self, now: float) -> None:
        if now > self.at:
            fading = exp((self.at - now) / DECAY_SECONDS)
            self.sizes, self.squares, self.at = self.sizes * fading, self.squares * fading, now

    @property
    def effective_requests(self) -> float:
        """How many of like size would make it up."""
        return self.sizes * self.sizes / self.squares if self.squares else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.sizes / DECAY_SECONDS

    @property
    def square_rate(self) -> float:
        return self.squares / DECAY_SECONDS


@dataclass(slots=True)
class RunningMean:
    """A running mean that gives way to what is new."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(MEAN_WINDOW_REQUESTS, self.count + 1)
        self.value += (value - self.value) / self.count


@dataclass(slots=True, eq=False)
class TenantState:
    """One tenant of one model.

    `asked` (what waits), `held` (what is in flight) and `demand` leave out batch work, which fills
    what is left. `is_heavy`: it asks for more than its part of the fleet, or has got more.
    """

    weight: float = 1.0
    reserved_tokens: int = 0
    counter: float = 0.0  # service in virtual tokens, over the weight
    queued_requests: int = 0  # requests of every priority
    queued_load: RequestTotals = field(default_factory=RequestTotals)
    in_flight_load: RequestTotals = field(default_factory=RequestTotals)
    demand: DecayingFlow = field(default_factory=DecayingFlow)
    mean_output: RunningMean = field(default_factory=RunningMean)  # tokens of a request
    is_above_share: bool = False
