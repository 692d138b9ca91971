"""A ratio and a line fit in which recent values count more. Pure."""


class DecayingRatio:
    """The ratio of two decaying sums, such as seconds over tokens; recent values count more.

    Each `add` first multiplies both sums by `1 - 1 / memory`. `prior` is the value that is assumed
    before anything is known, and it weighs as much as a denominator of `weight`.
    """

    def __init__(self, memory: float, prior: float = 0.0, weight: float = 0.0) -> None:
        self._decay = 1 - 1 / memory
        self._prior, self._weight = prior, weight
        self.sums = 0.0, 0.0  # the numerator's and the denominator's

    def add(self, numerator: float, denominator: float) -> None:
        """Add one observation: `numerator` to the upper sum and `denominator` to the lower one."""
        numerators, denominators = self.sums
        self.sums = (
            numerators * self._decay + numerator,
            denominators * self._decay + denominator,
        )

    @property
    def value(self) -> float:
        """The sum of numerators over that of denominators, with the prior weighed in.

        It is `prior` if nothing was added and the prior has no weight.
        """
        numerators, denominators = self.sums
        denominator = denominators + self._weight
        return (
            (numerators + self._prior * self._weight) / denominator if denominator else self._prior
        )


class DecayingLineFit:
    """A line fitted by least squares to points (x, y), of which recent ones count more.

    Each `add` first multiplies the weight of all earlier points by `1 - 1 / memory`. Neither the
    line's intercept nor its slope is ever negative.
    """

    def __init__(self, memory: float) -> None:
        self._decay = 1 - 1 / memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add the point (`x`, `y`) with full weight, and let earlier points weigh less."""
        decay = self._decay
        self._n = self._n * decay + 1
        self._x = self._x * decay + x
        self._y = self._y * decay + y
        self._xx = self._xx * decay + x * x
        self._xy = self._xy * decay + x * y

    @property
    def fit(self) -> tuple[float, float]:
        """The line's value at x = 0 and its slope, in this order; (0, 0) before the first point."""
        if not self._n:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        slope = (self._xy / self._n - mean_x * mean_y) / spread if spread > 1e-9 else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        return mean_y - slope * mean_x, slope
