"""How long a micro-batch computes, as learned from those that ran. Pure."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

DECAY = 0.97  # a sample's weight after the next one: those that count are about the last 30


@dataclass(frozen=True)
class _LeastSquaresSums:
    """What least squares need of weighted samples: tokens `x` and seconds `y`."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def with_sample(self, x: float, y: float) -> "_LeastSquaresSums":
        return self.merge(_LeastSquaresSums(1.0, x, y, x * x, x * y))

    def merge(self, other: "_LeastSquaresSums") -> "_LeastSquaresSums":
        return _LeastSquaresSums(
            *(a + b for a, b in zip(astuple(self), astuple(other), strict=True))
        )

    def decay(self) -> "_LeastSquaresSums":
        return _LeastSquaresSums(*(DECAY * each for each in astuple(self)))


class BatchTimeModel:
    """`overhead + per_token * tokens` seconds, by least squares; neither is ever negative.

    `tokens` are those of a micro-batch with its padding. The samples of the warm-up keep their
    weight for good: a steady load has micro-batches of one size, and those alone cannot tell the
    two apart.
    """

    def __init__(self, warm_up: Iterable[tuple[int, float]] = ()) -> None:
        self._warm_up, self._recent = _LeastSquaresSums(), _LeastSquaresSums()
        for tokens, seconds in warm_up:
            self._warm_up = self._warm_up.with_sample(tokens, seconds)
        self._fit()

    def add_sample(self, tokens: int, seconds: float) -> None:
        """One more micro-batch has run."""
        self._recent = self._recent.decay().with_sample(tokens, seconds)
        self._fit()

    def predict_seconds(self, tokens: float) -> float:
        """What a micro-batch will take."""
        return self.overhead + self.per_token * tokens

    @property
    def overhead_tokens(self) -> float:
        """How many tokens take as long as one more micro-batch."""
        return self.overhead / self.per_token if self.per_token else float("inf")

    def _fit(self) -> None:
        s = self._warm_up.merge(self._recent)
        spread = s.weight * s.xx - s.x * s.x
        slope = (s.weight * s.xy - s.x * s.y) / spread if spread > 1e-9 * s.xx else 0.0
        self.per_token = max(0.0, slope)
        self.overhead = (s.y - self.per_token * s.x) / s.weight if s.weight else 0.0
        if self.overhead < 0:
            self.overhead, self.per_token = 0.0, s.xy / s.xx
