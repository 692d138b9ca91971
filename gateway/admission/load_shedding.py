"""Load shedding: refuses requests of one model whose estimated wait is too long. Pure.

The dispatcher's estimate is up to 0.2 s old, so the tokens that this gateway has admitted since
then are added to it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from registry.models import LatencyGoals
from streams.errors import NoWorkers, Overloaded, TenantBacklog
from streams.messages import Pressure, ServiceTime
from streams.subjects import Priority

MAX_PRESSURE_AGE_SECONDS = 2.0  # a dispatcher reports every 0.2 s; older news refuses nobody
NO_WORKER_GRACE_SECONDS = 30.0  # without a worker, which may be restarting or on its way
NO_WORKER_RETRY_SECONDS = 10.0
MARGIN_SECONDS = 0.1  # of a goal or deadline, for the way there and back
Z_SCORE_99 = 2.33  # standard deviations: 99 of 100 waits are not longer
# Of the longest wait: a lane that refused admits again below it, since clients retry all at once
RESUME_RATIO = 0.8
_LaneKey = tuple[str, Priority]


@dataclass(frozen=True)
class LatencyTarget:
    """One request as load shedding sees it: its tenant and size, and by when it must be served.

    `cost` is the prompt tokens plus the most tokens it may generate. `deadline_seconds`, and
    `goal_seconds` to the first token (None without a goal), count from now.
    """

    tenant: str
    priority: Priority
    prompt_tokens: int
    cost: int
    deadline_seconds: float
    goal_seconds: float | None = None

    def max_wait(self, compute: ServiceTime) -> tuple[float, str]:
        """Return the longest wait in seconds that keeps the request in time, and that limit's name.

        The wait is the deadline less the computing time, or the goal less the time to first token
        if that is shorter, less a margin of 0.1 s. The wait is never below 0: where computing alone
        takes too long, refusing a request that need not wait gains nothing. The limit's name is a
        part of the sentence with which the request is refused.
        """
        seconds = compute.seconds(self.prompt_tokens, self.cost - self.prompt_tokens)
        max_wait = self.deadline_seconds - seconds
        limit_name = f"the deadline of {self.deadline_seconds:g} s"
        if self.goal_seconds is not None:
            first = compute.first_seconds(self.prompt_tokens) + Z_SCORE_99 * compute.first_spread
            to_goal = self.goal_seconds - first
            if to_goal < max_wait:
                max_wait = to_goal
                limit_name = f"the goal of {self.goal_seconds:g} s to the first token"
        return max(0.0, max_wait - MARGIN_SECONDS), limit_name


class LoadShedder:
    """Admits or refuses the requests of one model by their estimated wait.

    Times are seconds of any one clock.
    """

    def __init__(self) -> None:
        self._pressure: Pressure | None = None
        self._pressure_at = 0.0
        self._admitted_tokens: dict[Priority, Counter[str]] = {}  # by tenant, since the last report
        self._refusing_lanes: set[_LaneKey] = set()

    @property
    def worker_count(self) -> int:
        """The number of workers that serve the model, by the last report; 0 before the first."""
        return self._pressure.workers if self._pressure else 0

    @property
    def has_no_worker(self) -> bool:
        """True if a report has said that no worker serves the model."""
        return self._pressure is not None and not self._pressure.workers

    def update(self, pressure: Pressure, now: float) -> None:
        """Take a new report of the model's dispatcher, which arrived at `now`.

        All requests admitted before count as included in it.
        """
        self._pressure, self._pressure_at = pressure, now
        self._admitted_tokens = {priority: Counter() for priority in Priority}
        self._refusing_lanes = {
            lane for lane in self._refusing_lanes if pressure.estimated_wait(*lane)
        }

    def admit(
        self, target: LatencyTarget, now: float, seconds_to_worker: float | None = None
    ) -> float | None:
        """Admit a request, count its tokens, and return its estimated wait in seconds.

        None means that the wait is not known, because no report is less than 2 s old or the report
        does not say; the request is admitted then. `seconds_to_worker` is when the fleet has a
        worker for a model without one; None if it does not wake the model. Raises `NoWorkers` if
        that is too late for the deadline, or if no worker has served the model for
        `NO_WORKER_GRACE_SECONDS` and none is woken. If the request could not be in time, raises
        `TenantBacklog` if only its tenant's own queued requests are the reason, else `Overloaded`.
        """
        pressure = self._pressure
        if pressure is None or now - self._pressure_at > MAX_PRESSURE_AGE_SECONDS:
            return None
        if not pressure.workers and seconds_to_worker is not None:
            _check_cold_start(pressure, target, seconds_to_worker)
            return seconds_to_worker
        if not pressure.workers and pressure.unmanned_seconds >= NO_WORKER_GRACE_SECONDS:
            raise _no_workers_error(pressure)
        wait = self._estimate_wait(
            pressure, target, pressure.estimated_wait(target.tenant, target.priority)
        )
        if wait is not None:
            self._check_wait(pressure, target, wait)
        self._admitted_tokens[target.priority][target.tenant] += target.cost
        return wait

    def _check_wait(self, pressure: Pressure, target: LatencyTarget, wait: float) -> None:
        lane = target.tenant, target.priority
        max_wait, limit_name = target.max_wait(pressure.compute or ServiceTime())
        spread = 1 + Z_SCORE_99 * pressure.uncertainty
        max_wait /= spread
        if wait <= max_wait * (RESUME_RATIO if lane in self._refusing_lanes else 1.0):
            self._refusing_lanes.discard(lane)
            return
        self._refusing_lanes.add(lane)
        wait_without_own = self._estimate_wait(
            pressure, target, pressure.wait_seconds.get(target.priority), own=False
        )
        refusal = (
            TenantBacklog
            if wait_without_own is not None and wait_without_own <= max_wait
            else Overloaded
        )
        place = "behind this tenant's own requests " if refusal is TenantBacklog else ""
        message = (
            f"the estimated wait of {wait:.1f} s {place}(at worst {wait * spread:.1f} s) "
            f"is too long for {limit_name}"
        )
        raise refusal(message, max(1.0, wait - RESUME_RATIO * max_wait), wait)

    def _estimate_wait(
        self,
        pressure: Pressure,
        target: LatencyTarget,
        reported_wait: float | None,
        own: bool = True,
    ) -> float | None:
        """The reported wait, and that for the tokens admitted since then ahead of this request.

        Ahead are all tokens of more urgent priorities, and of the same priority those that the fair
        order serves first: of each other tenant no more than of this one. What has room at the
        workers at once is taken off. `own` is False to leave out this tenant's own tokens.
        """
        if reported_wait is None or pressure.seconds_per_token is None:
            return reported_wait
        admitted = self._admitted_tokens[target.priority]
        own_tokens = admitted[target.tenant] if own else 0
        ahead = own_tokens + _others_fair_share(admitted, target.tenant, own_tokens)
        ahead += sum(self._admitted_tokens[p].total() for p in _more_urgent(target.priority))
        waits = max(0.0, ahead - pressure.room_tokens.get(target.priority, 0.0))
        return reported_wait + waits * pressure.seconds_per_token


def _others_fair_share(admitted: Mapping[str, int], tenant: str, own_tokens: int) -> int:
    return sum(min(tokens, own_tokens) for name, tokens in admitted.items() if name != tenant)


def _more_urgent(priority: Priority) -> list[Priority]:
    order = list(Priority)
    return order[: order.index(priority)]


def _no_workers_error(pressure: Pressure) -> NoWorkers:
    message = f"no worker has served {pressure.model!r} for {pressure.unmanned_seconds:.0f} s"
    return NoWorkers(message, NO_WORKER_RETRY_SECONDS)


def _check_cold_start(pressure: Pressure, target: LatencyTarget, seconds: float) -> None:
    """Raise `NoWorkers` if a model's first worker is there too late for the deadline.

    A goal for the first token refuses nothing: at zero no request could keep it, and none would
    ever wake the model.
    """
    without_goal = replace(target, goal_seconds=None)
    max_wait, limit_name = without_goal.max_wait(pressure.compute or ServiceTime())
    if seconds > max_wait:
        raise NoWorkers(
            f"{pressure.model!r} rests without workers, and its first one is ready in "
            f"{seconds:.1f} s, which is too late for {limit_name}: give a later deadline, or ask "
            "again when it is awake",
            max(1.0, seconds),
        )


def first_token_goal_seconds(
    goals: Mapping[Priority, LatencyGoals], priority: Priority
) -> float | None:
    """Return the model's goal for the time to first token of a priority, in seconds.

    None if the model has no such goal.
    """
    goal = goals[priority].time_to_first_token_ms if priority in goals else None
    return None if goal is None else goal / 1000
