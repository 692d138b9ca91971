"""Predicts how long a micro-batch will take to compute, from those that ran. Pure."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

DECAY = 0.97  # of a sample's weight with each newer one: about the last 30 samples count


@dataclass(frozen=True)
class _LeastSquaresSums:
    """The sums over weighted samples that least squares needs: tokens `x` and seconds `y`."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def with_sample(self, x: float, y: float) -> "_LeastSquaresSums":
        """Return the sums with one more sample, of weight 1."""
        return self.merge(_LeastSquaresSums(1.0, x, y, x * x, x * y))

    def merge(self, other: "_LeastSquaresSums") -> "_LeastSquaresSums":
        """Return the sums over both sets of samples."""
        return _LeastSquaresSums(
            *(a + b for a, b in zip(astuple(self), astuple(other), strict=True))
        )

    def decay(self) -> "_LeastSquaresSums":
        """Return the sums with every sample's weight times `DECAY`."""
        return _LeastSquaresSums(*(DECAY * each for each in astuple(self)))


class BatchTimeModel:
    """Predicts a micro-batch's time as `overhead + per_token * tokens` seconds, by least squares.

    `overhead` and `per_token` are never negative. `tokens` are those of one micro-batch with its
    padding. `warm_up` has pairs of tokens and seconds, which keep their weight for good: a steady
    load has micro-batches of one size, and those alone cannot tell overhead from time per token. Of
    later measurements about the last 30 count.
    """

    def __init__(self, warm_up: Iterable[tuple[int, float]] = ()) -> None:
        self._warm_up, self._recent = _LeastSquaresSums(), _LeastSquaresSums()
        for tokens, seconds in warm_up:
            self._warm_up = self._warm_up.with_sample(tokens, seconds)
        self._fit()

    def add_sample(self, tokens: int, seconds: float) -> None:
        """Learn from a micro-batch of `tokens` tokens, with padding, that took `seconds`."""
        self._recent = self._recent.decay().with_sample(tokens, seconds)
        self._fit()

    def predict_seconds(self, tokens: float) -> float:
        """Return the seconds that a micro-batch of `tokens` tokens, with padding, will take."""
        return self.overhead + self.per_token * tokens

    @property
    def overhead_tokens(self) -> float:
        """Number of tokens that take as long as the overhead of one more micro-batch.

        Infinite while no time per token is known.
        """
        return self.overhead / self.per_token if self.per_token else float("inf")

    def _fit(self) -> None:
        s = self._warm_up.merge(self._recent)
        spread = s.weight * s.xx - s.x * s.x
        slope = (s.weight * s.xy - s.x * s.y) / spread if spread > 1e-9 * s.xx else 0.0
        self.per_token = max(0.0, slope)
        self.overhead = (s.y - self.per_token * s.x) / s.weight if s.weight else 0.0
        if self.overhead < 0:
            self.overhead, self.per_token = 0.0, s.xy / s.xx
