"""Averages in which what is recent counts more. Pure."""


class DecayingRatio:
    """A sum over a sum: of costs over costs, of seconds over tokens.

    Each addition makes the earlier ones count `1 - 1 / memory` of what they did. `prior` is what is
    believed before the first, and weighs as much as a denominator of `weight`.
    """

    def __init__(self, memory: float, prior: float = 0.0, weight: float = 0.0) -> None:
        self._decay = 1 - 1 / memory
        self._prior, self._weight = prior, weight
        self._over, self._under = 0.0, 0.0

    def add(self, over: float, under: float) -> None:
        self._over = self._over * self._decay + over
        self._under = self._under * self._decay + under

    @property
    def value(self) -> float:
        under = self._under + self._weight
        return (self._over + self._prior * self._weight) / under if under else self._prior


class DecayingLineFit:
    """A straight line through points, by least squares; neither part of it is ever negative."""

    def __init__(self, memory: float) -> None:
        self._decay = 1 - 1 / memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        keep = self._decay
        self._n = self._n * keep + 1
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y

    @property
    def fit(self) -> tuple[float, float]:
        """Where it begins, at x = 0, and how it rises; both 0 without a point."""
        if not self._n:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        rise = (self._xy / self._n - mean_x * mean_y) / spread if spread > 1e-9 else 0.0
        rise = min(max(0.0, rise), mean_y / mean_x if mean_x else 0.0)
        return mean_y - rise * mean_x, rise
