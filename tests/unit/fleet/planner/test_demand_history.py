"""The forecast: the mean of late, or what would have kept the goal of late."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.planner.demand_history import DemandHistory, least_capacity
from fleet.planner.planner_options import PlannerOptions

STEPS = st.lists(st.floats(0, 5000), min_size=1, max_size=60)


def test_even_demand_needs_no_more_than_itself() -> None:
    """There is no room for jumps that never came."""
    history = DemandHistory(PlannerOptions())
    for second in range(600):
        history.observe(100.0, float(second))
    assert 95.0 <= history.forecast <= 100.0


def test_demand_that_jumps_has_room_for_it() -> None:
    """A tenth of the time it is ten times as much; the mean is less than a fifth of that."""
    history = DemandHistory(PlannerOptions())
    for second in range(600):
        history.observe(1000.0 if second // 10 % 10 == 0 else 100.0, float(second))
    assert 450.0 <= history.forecast <= 1000.0


@given(STEPS, st.floats(0, 0.1))
def test_the_least_capacity_loses_no_more_than_it_may(demand: list[float], lost: float) -> None:
    """A queue as long as the goal is worked off later; what is beyond that is lost."""
    capacity = least_capacity(demand, 10.0, lost)
    queue = gone = 0.0
    for each in demand:
        waiting = max(0.0, queue + each - capacity)
        queue = min(waiting, capacity)
        gone += waiting - queue
    assert gone <= lost * sum(demand) * (1 + 1e-6) + 1e-6
    assert capacity <= max(demand)


@given(STEPS, st.floats(0, 0.1), st.floats(1.0, 3.0))
def test_a_longer_goal_needs_no_more(demand: list[float], lost: float, longer: float) -> None:
    """What may wait longer is spread over more time."""
    patient = least_capacity(demand, 10.0 * longer, lost)
    assert patient <= least_capacity(demand, 10.0, lost) + max(demand) / 512
