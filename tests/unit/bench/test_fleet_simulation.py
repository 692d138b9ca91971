"""The simulated fleet pays each machine for all of its time, and divides that without a rest."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.autoscaling import arrivals
from bench.autoscaling.fleet_simulation import SimulatedFleet
from bench.autoscaling.scalers import PlannerScaler, StaticScaler
from simulation.step_model import StepModel
from streams.records.fleet.machine_types import MachineType

STEPS = StepModel()


def fleet_of(prices: tuple[int, int], period: float, rate: float, seed: int) -> SimulatedFleet:
    kinds = {
        name: (MachineType(name, boot_seconds=7.0, price_per_hour=price), STEPS.speed_up(factor))
        for name, price, factor in (("small", prices[0], 1.0), ("large", prices[1], 3.0))
    }
    capacities = {("m", "small"): 900.0, ("m", "large"): 2700.0}
    asked = arrivals.on_and_off(period, rate, 200.0, STEPS, Random(seed))
    return SimulatedFleet(kinds, capacities, asked, is_metered=True)


@settings(max_examples=15)
@given(
    st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)),
    st.floats(5.0, 100.0),
    st.floats(0.5, 6.0),
    st.integers(0, 100),
)
def test_requests_idle_and_boot_are_machine_time_times_price(
    prices: tuple[int, int], period: float, rate: float, seed: int
) -> None:
    """Exactly, by the meter that real workers have; `lost` is of what runs at the end."""
    fleet = fleet_of(prices, period, rate, seed)
    fleet.run(PlannerScaler(fleet), 200.0, {"m": {"small": 1}})
    assert fleet.money.total == fleet.cost()
    assert {machine.id for machine in fleet.over} >= {"m-0"}
    assert not fleet.machines


def test_a_request_that_would_wait_longer_than_its_goal_is_refused() -> None:
    """And counts as one that has missed it."""
    fleet = fleet_of((1, 1), 1000.0, 8.0, 1)
    fleet.run(StaticScaler(), 200.0, {"m": {"small": 1}})
    refused = len(fleet.loads["m"].refused)
    assert refused > 100
    assert fleet.attainment() <= 1 - refused / len(fleet.requests)
