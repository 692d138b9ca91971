"""What is kept of each tenant: its terms and service, what it waits for and holds. Pure."""

from dataclasses import dataclass, field
from math import exp

MEMORY_SECONDS = 30.0  # what was asked for fades by 1/e in this time
LEARNED_REQUESTS = 20  # a mean is over about so many requests


def room_of(requests: int, tokens: int, place: float) -> float:
    """The room that requests take, in tokens, where each needs `place` at least."""
    places = requests * place
    return max(places, tokens)


@dataclass(slots=True)
class Load:
    """Some requests and the tokens that they reserve."""

    requests: int = 0
    tokens: int = 0

    def add(self, cost: int) -> None:
        self.requests += 1
        self.tokens += cost

    def remove(self, cost: int) -> None:
        self.requests -= 1
        self.tokens -= cost

    def size(self, place: float) -> float:
        """The room that it takes, in tokens."""
        return room_of(self.requests, self.tokens, place)


@dataclass(slots=True)
class Flow:
    """Sizes that come or go over time: their sum and that of their squares, both fading."""

    sizes: float = 0.0
    squares: float = 0.0
    at: float = 0.0

    def add(self, size: float, now: float) -> None:
        self.fade(now)
        self.sizes += size
        self.squares += size * size

    def join(self, other: "Flow", sign: int) -> None:
        """Add another's, or take it away, as of the later of the two."""
        self.fade(other.at)
        other.fade(self.at)
        self.sizes = max(0.0, self.sizes + sign * other.sizes)
        self.squares = max(0.0, self.squares + sign * other.squares)

    def fade(self, now: float) -> None:
        if now > self.at:
            fading = exp((self.at - now) / MEMORY_SECONDS)
            self.sizes, self.squares, self.at = self.sizes * fading, self.squares * fading, now

    @property
    def requests(self) -> float:
        """How many of like size would make it up."""
        return self.sizes * self.sizes / self.squares if self.squares else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.sizes / MEMORY_SECONDS

    @property
    def square_rate(self) -> float:
        return self.squares / MEMORY_SECONDS


@dataclass(slots=True)
class Mean:
    """A running mean that gives way to what is new."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(LEARNED_REQUESTS, self.count + 1)
        self.value += (value - self.value) / self.count


@dataclass(slots=True, eq=False)
class Account:
    """One tenant of one model.

    `asked` (what waits), `held` (what is in flight) and `demand` leave out batch work, which fills
    what is left. `is_heavy`: it asks for more than its part of the fleet, or has got more.
    """

    weight: float = 1.0
    reserved_tokens: int = 0
    counter: float = 0.0  # service in virtual tokens, over the weight
    waiting: int = 0  # requests of every priority
    asked: Load = field(default_factory=Load)
    held: Load = field(default_factory=Load)
    demand: Flow = field(default_factory=Flow)
    generated: Mean = field(default_factory=Mean)  # tokens of a request
    is_heavy: bool = False
