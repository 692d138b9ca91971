"""The planner of capacity: the formula, what one worker fewer does, and which type is cheapest."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from millstream.curves.capacity_plan import (
    CapacityPlan,
    Demand,
    HourCost,
    PlanTooLarge,
    cheapest_first,
    make_plan,
)
from millstream.curves.plan_settings import PlanSettings
from streams.records.fleet.curves import Curve, CurveSource
from streams.records.fleet.step_times import CapacityGoals, RequestShape, StepTimes

TIMES = StepTimes(step_seconds=0.02, sequence_seconds=0.0005, prompt_token_seconds=0.0001)
CURVE = Curve("m", "1", "l4", CurveSource.BENCH, 5.0, TIMES, max_sequences=32, kv_tokens=50_000)
SHAPE = RequestShape(500, 200)
COST = HourCost(0.8, "USD")


def plan(demand: Demand, curve: Curve = CURVE, cost: HourCost | None = COST) -> CapacityPlan:
    found = make_plan(curve, demand, cost)
    assert found
    return found


def test_workers_are_rate_times_seconds_by_batch_and_utilisation() -> None:
    """An operator can compute it again from the line that is printed."""
    demand = Demand(10_000 / 60, SHAPE, CapacityGoals())
    found = plan(demand)
    places = demand.requests_per_second * CURVE.times.request_seconds(32, SHAPE)
    assert found.capacity.batch == 32
    assert found.planned.workers == -(-places // (32 * 0.8))
    assert found.planned.utilisation <= 0.8
    assert found.one_fewer
    assert found.one_fewer.utilisation > 0.8
    assert found.formula.endswith(f"so {found.planned.workers}")
    millions = 3600 * demand.requests_per_second * 700 / 10**6
    assert found.planned.cost_per_hour == pytest.approx(0.8 * found.planned.workers)
    assert found.planned.cost_per_million_tokens == pytest.approx(
        0.8 * found.planned.workers / millions
    )


def test_fewer_workers_are_slower_until_they_are_too_few() -> None:
    """That is what an operator who would save one wants to know."""
    rate = 0.95 * CURVE.capacity_at(32, SHAPE).requests_per_second
    found = plan(Demand(2 * rate, SHAPE, CapacityGoals(first_token_seconds=1.0)))
    assert found.planned.workers == 3
    assert found.one_fewer
    steps = [found.one_more, found.planned, found.one_fewer]
    for name in ("utilisation", "running", "first_token_seconds", "token_seconds"):
        values = [getattr(each, name) for each in steps]
        assert values == sorted(values)
    over = plan(Demand(0.9 * rate / 0.95, SHAPE, CapacityGoals(), utilisation=0.5))
    assert over.planned.workers == 2
    over = plan(Demand(1.5 * rate, SHAPE, CapacityGoals(), utilisation=0.99))
    assert over.one_fewer
    assert over.one_fewer.utilisation > 1
    assert over.one_fewer.first_token_seconds is None
    assert not over.one_fewer.keeps_goals


def test_a_wait_for_a_place_is_in_the_time_to_the_first_token() -> None:
    """Of a single place that is half used, the mean wait is what one request takes."""
    single = replace(CURVE, max_sequences=1)
    seconds = single.times.request_seconds(1, SHAPE)
    found = plan(Demand(0.5 / seconds, SHAPE, CapacityGoals()), single)
    assert found.planned.workers == 1
    assert found.planned.utilisation == pytest.approx(0.5)
    assert found.planned.wait_seconds == pytest.approx(seconds)


def test_goals_make_batches_smaller_and_workers_more() -> None:
    """A goal is paid for; one that is out of reach is no plan."""
    free = plan(Demand(50, SHAPE, CapacityGoals()))
    tight = plan(Demand(50, SHAPE, CapacityGoals(token_seconds=0.03)))
    assert tight.capacity.batch < free.capacity.batch
    assert tight.planned.workers > free.planned.workers
    assert tight.planned.keeps_goals
    assert (
        make_plan(CURVE, Demand(50, SHAPE, CapacityGoals(first_token_seconds=0.01)), COST) is None
    )


def test_the_cheapest_type_comes_first() -> None:
    """A faster type is worth its price, or not; one without a price comes last."""
    demand = Demand(50, SHAPE, CapacityGoals())
    fast = replace(CURVE, type="fast", times=TIMES.scaled(0.25))
    plans = [
        plan(demand),
        plan(demand, replace(CURVE, type="unpriced"), None),
        plan(demand, fast, HourCost(1.6, "USD")),
    ]
    assert [each.curve.type for each in cheapest_first(plans)] == ["fast", "l4", "unpriced"]


def settings(**told: object) -> PlanSettings:
    given = {"rate": "1/s", "prompt": 1, "output": 1, "model": "m", **told}
    return PlanSettings.model_validate(given)


def test_rates_and_goals_are_read_as_people_write_them() -> None:
    """And a wrong one is refused with the form of a right one."""
    assert settings(rate="10000/min").rate == pytest.approx(10_000 / 60)
    assert settings(rate="3600/h").rate == settings(rate="1").rate == 1
    goals = settings(goal=("ttft=0.5", "itl=0.02", "ttft=0.4")).goals
    assert goals == CapacityGoals(0.4, 0.02)
    for wrong in ({"rate": "10/day"}, {"rate": "0"}, {"goal": ("ttft",)}, {"goal": ("tttf=1",)}):
        with pytest.raises(ValidationError):
            settings(**wrong)


def test_a_plan_for_too_many_workers_is_refused_with_the_number() -> None:
    """Computing what waits would take minutes, and all memory."""
    with pytest.raises(PlanTooLarge, match="1,000,000 places"):
        plan(Demand(10**7, SHAPE, CapacityGoals()))
