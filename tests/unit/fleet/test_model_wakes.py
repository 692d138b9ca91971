"""What is told of a model without workers: how long its wake takes, and how far it is."""

from math import inf

import pytest

from fleet.model_wakes import find_cold_starts, find_wakes
from streams.records.fleet.cold_start import ColdStart
from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.machine_list import Machine, MachineList, MachineState
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy
from streams.records.fleet.waking import Waking

TYPES = {
    "small": MachineType("small", boot_seconds=40.0, price_per_hour=1),
    "quick": MachineType("quick", boot_seconds=10.0, price_per_hour=9),
}
WANTED = {"m-1": WantedMachine("small", "mock", "", inf)}
LOADS = {"mock": {"small": 5.0}}
PLAN = FleetPlan(machines=WANTED, load_seconds=LOADS)
NOW = 100.0


def known(*machines: Machine, policies: dict[str, ModelPolicy] | None = None) -> MachineList:
    by_name = {f"m-{n}": each for n, each in enumerate(machines, start=1)}
    return MachineList(types=TYPES, machines=by_name, policies=policies or {})


def machine(state: MachineState) -> Machine:
    return Machine("small", "mock", state, 90.0, 95.0)


def test_a_cold_start_is_that_of_the_quickest_type() -> None:
    """A request is refused only if no type could be in time; models without workers have none."""
    found = find_cold_starts(
        ["mock", "never"], known(policies={"never": ModelPolicy(max_workers=0)}), LOADS
    )
    assert found == {"mock": ColdStart("quick", 10.0, None)}
    slow = {"mock": {"quick": 60.0, "small": 5.0}}
    assert find_cold_starts(["mock"], known(), slow) == {"mock": ColdStart("small", 40.0, 5.0)}


@pytest.mark.parametrize(
    ("machines", "told"),
    [
        ([], Waking("mock", "ordered", 145.0)),
        ([machine(MachineState.OUT_OF_STOCK)], Waking("mock", "ordered", None)),
        ([machine(MachineState.BOOTING)], Waking("mock", "booting", 135.0)),
        ([machine(MachineState.RUNNING)], Waking("mock", "loading", 100.0)),
    ],
)
def test_a_wake_is_as_far_as_its_machine(machines: list[Machine], told: Waking) -> None:
    """Nobody can say when a machine comes that is out of stock."""
    assert find_wakes(PLAN, known(*machines), set(), NOW) == [told]


def test_the_first_of_several_machines_counts() -> None:
    """One that is out of stock hides none that boots."""
    plan = FleetPlan(machines={**WANTED, "m-2": WANTED["m-1"]}, load_seconds=LOADS)
    both = known(machine(MachineState.OUT_OF_STOCK), machine(MachineState.BOOTING))
    assert find_wakes(plan, both, set(), NOW) == [Waking("mock", "booting", 135.0)]


def test_a_load_that_was_never_measured_is_not_guessed() -> None:
    """A guess would be told to clients as a promise."""
    (waking,) = find_wakes(
        FleetPlan(machines=WANTED), known(machine(MachineState.RUNNING)), set(), NOW
    )
    assert waking == Waking("mock", "loading", None)


def test_a_model_with_a_worker_wakes_no_more() -> None:
    """Further machines of it are nobody's cold start."""
    assert find_wakes(PLAN, known(machine(MachineState.BOOTING)), {"mock"}, NOW) == []
