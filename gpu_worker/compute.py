"""How long a micro-batch computes, as learned from those that ran. Pure."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

KEPT = 0.97  # a sample's weight after the next one: those that count are about the last 30


@dataclass(frozen=True)
class _Sums:
    """What least squares need of weighted samples: tokens `x` and seconds `y`."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def plus(self, x: float, y: float) -> "_Sums":
        return self.joined(_Sums(1.0, x, y, x * x, x * y))

    def joined(self, other: "_Sums") -> "_Sums":
        return _Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def faded(self) -> "_Sums":
        return _Sums(*(KEPT * each for each in astuple(self)))


class ComputeTime:
    """`overhead + per_token * tokens` seconds, by least squares; neither is ever negative.

    `tokens` are those of a micro-batch with its padding. The samples of the warm-up keep their
    weight for good: a steady load has micro-batches of one size, and those alone cannot tell the
    two apart.
    """

    def __init__(self, warm_up: Iterable[tuple[int, float]] = ()) -> None:
        self._first, self._recent = _Sums(), _Sums()
        for tokens, seconds in warm_up:
            self._first = self._first.plus(tokens, seconds)
        self._fit()

    def learn(self, tokens: int, seconds: float) -> None:
        """One more micro-batch has run."""
        self._recent = self._recent.faded().plus(tokens, seconds)
        self._fit()

    def seconds(self, tokens: float) -> float:
        """What a micro-batch will take."""
        return self.overhead + self.per_token * tokens

    @property
    def overhead_tokens(self) -> float:
        """How many tokens take as long as one more micro-batch."""
        return self.overhead / self.per_token if self.per_token else float("inf")

    def _fit(self) -> None:
        s = self._first.joined(self._recent)
        spread = s.weight * s.xx - s.x * s.x
        slope = (s.weight * s.xy - s.x * s.y) / spread if spread > 1e-9 * s.xx else 0.0
        self.per_token = max(0.0, slope)
        self.overhead = (s.y - self.per_token * s.x) / s.weight if s.weight else 0.0
        if self.overhead < 0:
            self.overhead, self.per_token = 0.0, s.xy / s.xx
