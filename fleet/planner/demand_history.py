"""The demand for a model of late, and the capacity that it needs. Pure."""

from collections import deque
from collections.abc import Iterable

from fleet.planner.planner_options import PlannerOptions

STEP_SECONDS = 10.0  # what is told within one step counts as even
HALVINGS = 10  # of the distance between the mean demand and the highest


class DemandHistory:
    """Demand of one model in tokens a second, as it is told from time to time.

    The forecast is the greater of two: the mean of the last `level_seconds`, and the least capacity
    that would have kept the goal of `kept_share` of what arrived in the last `memory_seconds`, with
    a queue as long as the goal allows. Demand that jumps so has more room than one that is even.
    """

    def __init__(self, options: PlannerOptions) -> None:
        self._options = options
        self._steps = deque[float](maxlen=max(1, round(options.memory_seconds / STEP_SECONDS)))
        self._step_began: float | None = None
        self._told: list[float] = []  # in the step that is not over
        self._steady = 0.0  # least capacity, as of the last step
        self._needs: deque[tuple[float, float]] = deque()  # (time, need), falling

    def observe(self, demand: float, at: float) -> None:
        """Take the demand at a time, and the goal for the time to first token."""
        if self._step_began is None:
            self._step_began = at
        if at - self._step_began >= STEP_SECONDS and self._told:
            self._steps.append(sum(self._told) / len(self._told))
            lost_share = 1 - self._options.kept_share
            self._steady = least_capacity(self._steps, self._options.goal_seconds, lost_share)
            self._told, self._step_began = [], at
        self._told.append(demand)

    @property
    def forecast(self) -> float:
        """The demand to be ready for; 0 before anything was told."""
        count = max(1, round(self._options.level_seconds / STEP_SECONDS))
        recent = list(self._steps)[-count:]
        part = min(1.0, len(self._told) / STEP_SECONDS)  # of the step that is not over
        whole = sum(recent) + (part * sum(self._told) / len(self._told) if self._told else 0.0)
        level = whole / (len(recent) + part) if whole else 0.0
        return max(level, self._steady)

    def hold(self, need: float, at: float) -> float:
        """Take the need at a time, and return the greatest of the last `hold_seconds`."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((at, need))
        while self._needs[0][0] < at - self._options.hold_seconds:
            self._needs.popleft()
        return self._needs[0][1]


def least_capacity(demand: Iterable[float], goal_seconds: float, lost_share: float) -> float:
    """Return the least capacity that loses at most a share of some demand, told by steps.

    What would wait longer than the goal is lost. It is found to a thousandth of the highest demand.
    """
    steps = list(demand)
    allowed = lost_share * sum(steps)
    low, high = 0.0, max(steps, default=0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _lost(steps, middle, goal_seconds) > allowed:
            low = middle
        else:
            high = middle
    return high


def _lost(steps: Iterable[float], capacity: float, goal_seconds: float) -> float:
    """Demand that a capacity loses, in tokens a second summed over the steps."""
    room = capacity * goal_seconds / STEP_SECONDS
    queue = lost = 0.0
    for demand in steps:
        queue = max(0.0, queue + demand - capacity)
        if queue > room:
            lost, queue = lost + queue - room, room
    return lost
