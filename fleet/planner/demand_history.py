"""How much of a model is needed, from what was asked of it lately. Pure."""

from collections import deque
from math import sqrt

MEMORY_SECONDS = 600.0  # over which changes of the demand are remembered


class DemandHistory:
    """Demand of one model in tokens a second, as it is told from time to time.

    The forecast is the demand now and `DEVIATIONS` standard deviations of its change over as long
    as a machine takes to serve: demand that jumps has more room than one that is even.
    """

    DEVIATIONS = 1.0

    def __init__(self, hold_seconds: float) -> None:
        self._hold_seconds = hold_seconds
        self._told: deque[tuple[float, float]] = deque()  # (time, demand), for one boot time
        self._variance = 0.0
        self._needs: deque[tuple[float, float]] = deque()  # (time, need), falling
        self.now: float | None = None  # demand as it was told last

    def observe(self, demand: float, ready_seconds: float, at: float) -> None:
        """Take the demand at a time, which machines serve after `ready_seconds`."""
        seconds = at - self._told[-1][0] if self._told else 0.0
        while len(self._told) > 1 and self._told[1][0] <= at - ready_seconds:
            self._told.popleft()
        if self._told:
            change = demand - self._told[0][1]
            weight = min(1.0, seconds / MEMORY_SECONDS)
            self._variance += weight * (change**2 - self._variance)
        self._told.append((at, demand))
        self.now = demand

    @property
    def forecast(self) -> float:
        """The demand to be ready for; 0 before anything was told."""
        return (self.now or 0.0) + self.DEVIATIONS * sqrt(self._variance)

    def hold(self, need: float, at: float) -> float:
        """Take the need at a time, and return the greatest of the last `hold_seconds`."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((at, need))
        while self._needs[0][0] < at - self._hold_seconds:
            self._needs.popleft()
        return self._needs[0][1]
