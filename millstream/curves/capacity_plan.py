"""Computes how many workers of a type a rate of requests needs, and what one more changes. Pure.

The formula is `workers = rate * seconds of a request / batch / utilisation`, rounded up: by
Little's law `rate * seconds` requests are in work at any time, and a worker has `batch` places for
them. Not all of them are used, since arrivals come in no even rhythm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, log

from streams.errors import MillstreamError
from streams.records.fleet.curves import Capacity, Curve
from streams.records.fleet.step_times import CapacityGoals, RequestShape

MOST_PLACES = 1_000_000  # on all workers together: a second of computing


class PlanTooLarge(MillstreamError):
    """The plan needs too many workers for its queue to be computed."""

    def __init__(self, workers: int, batch: int) -> None:
        super().__init__(
            f"{workers:,} workers with {batch:,} requests each are more than {MOST_PLACES:,} "
            "places: plan for a part of the rate, and multiply"
        )


@dataclass(frozen=True)
class Demand:
    """Requests a second of one shape, their goals, and the share of the places to be used."""

    requests_per_second: float
    shape: RequestShape
    goals: CapacityGoals
    utilisation: float = 0.8

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and outputs together."""
        return self.requests_per_second * self.shape.tokens


@dataclass(frozen=True)
class HourCost:
    """The price of an hour of a machine; `currency` is a code of ISO 4217."""

    price: float
    currency: str


@dataclass(frozen=True)
class Forecast:
    """The forecast of a demand on so many workers.

    `utilisation` is the share of what they can do; at 1 or more the queue grows without end, and
    there are no seconds then. `running` are requests at once on each worker. The seconds are means,
    `wait_seconds` that for a place on a worker, which is in `first_token_seconds`.
    """

    workers: int
    utilisation: float
    running: float | None = None
    wait_seconds: float | None = None
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    keeps_goals: bool = False
    cost_per_hour: float | None = None
    cost_per_million_tokens: float | None = None


@dataclass(frozen=True)
class CapacityPlan:
    """The workers of one type that a demand needs, with one fewer and one more beside it.

    `one_fewer` is None where there is only one.
    """

    curve: Curve
    demand: Demand
    capacity: Capacity
    planned: Forecast
    one_fewer: Forecast | None
    one_more: Forecast
    currency: str | None

    @property
    def formula(self) -> str:
        """The computation of the number of workers, with its numbers."""
        demand, capacity = self.demand, self.capacity
        return (
            f"{demand.requests_per_second:,.4g}/s x {capacity.request_seconds:,.4g} s "
            f"/ {capacity.batch} / {demand.utilisation:g} = "
            f"{_workers(demand, capacity):,.2f}, so {self.planned.workers:,}"
        )


def make_plan(curve: Curve, demand: Demand, cost: HourCost | None) -> CapacityPlan | None:
    """Return the plan for workers with this curve; None if not one request keeps the goals there.

    `cost` None: nobody has said what the type costs.
    """
    capacity = curve.capacity(demand.shape, demand.goals)
    if capacity is None:
        return None
    workers = max(1, ceil(_workers(demand, capacity)))
    return CapacityPlan(
        curve,
        demand,
        capacity,
        forecast(curve, demand, capacity, workers, cost),
        forecast(curve, demand, capacity, workers - 1, cost) if workers > 1 else None,
        forecast(curve, demand, capacity, workers + 1, cost),
        cost.currency if cost else None,
    )


def forecast(
    curve: Curve, demand: Demand, capacity: Capacity, workers: int, cost: HourCost | None
) -> Forecast:
    """Return what so many workers make of a demand, each with as many places as `capacity` has."""
    used = demand.requests_per_second / (workers * capacity.requests_per_second)
    hourly = workers * cost.price if cost else None
    millions = 3600 * demand.tokens_per_second / 10**6
    each = None if hourly is None else hourly / millions
    if used >= 1:
        return Forecast(workers, used, cost_per_hour=hourly, cost_per_million_tokens=each)
    arriving, shape, goals = demand.requests_per_second, demand.shape, demand.goals
    running, queued = _mean_load(curve, demand, capacity.batch, workers)
    seconds, wait = running / arriving, queued / arriving
    on_worker = running / workers
    joined = min(float(capacity.batch), on_worker + 1)
    first = min(seconds, curve.times.first_token_seconds(joined, shape))
    token = (seconds - first) / max(1.0, shape.output_tokens - 1)
    keeps = _is_within(first + wait, goals.first_token_seconds) and _is_within(
        token, goals.token_seconds
    )
    return Forecast(workers, used, on_worker, wait, first + wait, token, keeps, hourly, each)


def _workers(demand: Demand, capacity: Capacity) -> float:
    places = demand.requests_per_second * capacity.request_seconds
    return places / capacity.batch / demand.utilisation


def _mean_load(curve: Curve, demand: Demand, batch: int, workers: int) -> tuple[float, float]:
    """Return how many requests run on all workers on average, and how many wait for a place.

    Requests arrive by chance, and end the faster the fewer run: a birth-death process, whose state
    is the number of requests. Beyond all places there is a geometric tail.
    """
    places, rate = workers * batch, demand.requests_per_second
    if places > MOST_PLACES:
        raise PlanTooLarge(workers, batch)
    logs = [0.0]
    for count in range(1, places + 1):
        seconds = curve.times.request_seconds(max(1.0, count / workers), demand.shape)
        logs.append(logs[-1] + log(rate * seconds / count))
    highest = max(logs)
    weights = [exp(each - highest) for each in logs]
    ratio = exp(logs[-1] - logs[-2])  # of each state beyond to the one before it; below 1
    beyond = weights[-1] * ratio / (1 - ratio)
    total = sum(weights) + beyond
    running = sum(count * weight for count, weight in enumerate(weights)) + places * beyond
    return running / total, beyond / (1 - ratio) / total


def _is_within(seconds: float, goal: float | None) -> bool:
    return goal is None or seconds <= goal


def cheapest_first(plans: list[CapacityPlan]) -> Iterator[CapacityPlan]:
    """Yield plans by cost; those whose cost nobody knows come last, by workers."""
    yield from sorted(plans, key=_rank)


def _rank(plan: CapacityPlan) -> tuple[bool, bool, float]:
    cost, workers = plan.planned.cost_per_hour, plan.planned.workers
    return not plan.planned.keeps_goals, cost is None, workers if cost is None else cost
