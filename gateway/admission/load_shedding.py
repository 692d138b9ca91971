"""The estimated wait of one model's requests, and who is refused because of it. Pure.

What the dispatcher tells is up to 0.2 s old, so what this gateway has admitted since then is added.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from registry.models import LatencyGoals
from streams.errors import NoWorkers, Overloaded, TenantBacklog
from streams.messages import Pressure, ServiceTime
from streams.subjects import Priority

MAX_PRESSURE_AGE_SECONDS = 2.0  # a dispatcher tells every 0.2 s; older news is no reason to refuse
NO_WORKER_GRACE_SECONDS = 30.0  # without a worker: it restarts, or the first one is on its way
NO_WORKER_RETRY_SECONDS = 10.0
MARGIN_SECONDS = 0.1  # of a goal or deadline, for the way there and back
Z_SCORE_99 = 2.33  # standard deviations: 99 of 100 waits are not longer
RESUME_RATIO = 0.8  # of the longest wait that is let in: those refused try again all at once
_LaneKey = tuple[str, Priority]


@dataclass(frozen=True)
class LatencyTarget:
    """What a request hopes for: tokens, and seconds from now to its end and its first token."""

    tenant: str
    priority: Priority
    prompt_tokens: int
    cost: int
    deadline_seconds: float
    goal_seconds: float | None = None

    def max_wait(self, compute: ServiceTime) -> tuple[float, str]:
        """The longest wait with which it is in time, never below 0, and what for.

        Wmax = goal - compute - margin. Where the computing alone is too long nothing is gained by
        refusing a request that need not wait.
        """
        seconds = compute.seconds(self.prompt_tokens, self.cost - self.prompt_tokens)
        longest = self.deadline_seconds - seconds
        what = f"the deadline of {self.deadline_seconds:g} s"
        if self.goal_seconds is not None:
            first = compute.first_seconds(self.prompt_tokens) + Z_SCORE_99 * compute.first_spread
            to_goal = self.goal_seconds - first
            if to_goal < longest:
                longest = to_goal
                what = f"the goal of {self.goal_seconds:g} s to the first token"
        return max(0.0, longest - MARGIN_SECONDS), what


class LoadShedder:
    """What is known of one model's waits. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._pressure: Pressure | None = None
        self._pressure_at = 0.0
        self._admitted_tokens: dict[Priority, Counter[str]] = {}  # tokens since then
        self._refusing_lanes: set[_LaneKey] = set()

    @property
    def worker_count(self) -> int:
        """How many workers serve the model, as far as its dispatcher has told."""
        return self._pressure.workers if self._pressure else 0

    def update(self, pressure: Pressure, now: float) -> None:
        """The dispatcher's news: what was admitted before is in it."""
        self._pressure, self._pressure_at = pressure, now
        self._admitted_tokens = {priority: Counter() for priority in Priority}
        self._refusing_lanes = {
            lane for lane in self._refusing_lanes if pressure.estimated_wait(*lane)
        }

    def admit(self, wish: LatencyTarget, now: float) -> float | None:
        """Let a request in: its estimated wait, None while nothing is known.

        Raises `NoWorkers`, `TenantBacklog` or `Overloaded` for one that could not be in time.
        """
        pressure = self._pressure
        if pressure is None or now - self._pressure_at > MAX_PRESSURE_AGE_SECONDS:
            return None
        if not pressure.workers and pressure.unmanned_seconds >= NO_WORKER_GRACE_SECONDS:
            raise _no_workers_error(pressure)
        wait = self._estimate_wait(
            pressure, wish, pressure.estimated_wait(wish.tenant, wish.priority)
        )
        if wait is not None:
            self._check_wait(pressure, wish, wait)
        self._admitted_tokens[wish.priority][wish.tenant] += wish.cost
        return wait

    def _check_wait(self, pressure: Pressure, wish: LatencyTarget, wait: float) -> None:
        lane = wish.tenant, wish.priority
        longest, what = wish.max_wait(pressure.compute or ServiceTime())
        spread = 1 + Z_SCORE_99 * pressure.uncertainty
        longest /= spread
        if wait <= longest * (RESUME_RATIO if lane in self._refusing_lanes else 1.0):
            self._refusing_lanes.discard(lane)
            return
        self._refusing_lanes.add(lane)
        alone = self._estimate_wait(
            pressure, wish, pressure.wait_seconds.get(wish.priority), own=False
        )
        refusal = TenantBacklog if alone is not None and alone <= longest else Overloaded
        whose = "behind this tenant's own requests " if refusal is TenantBacklog else ""
        message = (
            f"the estimated wait of {wait:.1f} s {whose}(at worst {wait * spread:.1f} s) "
            f"is too long for {what}"
        )
        raise refusal(message, max(1.0, wait - RESUME_RATIO * longest), wait)

    def _estimate_wait(
        self, pressure: Pressure, wish: LatencyTarget, told: float | None, own: bool = True
    ) -> float | None:
        """What was told, and what has been admitted since that is ahead of the wish.

        Beyond what had room at once that is everything more urgent, and of the same priority what
        the fair order serves first: of each other tenant no more than of this one.
        """
        if told is None or pressure.seconds_per_token is None:
            return told
        recent = self._admitted_tokens[wish.priority]
        mine = recent[wish.tenant] if own else 0
        ahead = mine + _others_fair_share(recent, wish.tenant, mine)
        ahead += sum(self._admitted_tokens[p].total() for p in _more_urgent(wish.priority))
        waits = max(0.0, ahead - pressure.room_tokens.get(wish.priority, 0.0))
        return told + waits * pressure.seconds_per_token


def _others_fair_share(recent: Mapping[str, int], tenant: str, most: int) -> int:
    return sum(min(tokens, most) for name, tokens in recent.items() if name != tenant)


def _more_urgent(priority: Priority) -> list[Priority]:
    order = list(Priority)
    return order[: order.index(priority)]


def _no_workers_error(pressure: Pressure) -> NoWorkers:
    message = f"no worker has served {pressure.model!r} for {pressure.unmanned_seconds:.0f} s"
    return NoWorkers(message, NO_WORKER_RETRY_SECONDS)


def first_token_goal_seconds(
    goals: Mapping[Priority, LatencyGoals], priority: Priority
) -> float | None:
    """The time to first token that a model's goals want for a priority."""
    goal = goals[priority].time_to_first_token_ms if priority in goals else None
    return None if goal is None else goal / 1000
